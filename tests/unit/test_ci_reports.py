"""Reports for CI servers: there whatever happened, in the form the servers read."""

import json
from pathlib import Path
from xml.etree import ElementTree as Xml

import pytest
import xmlschema

from rcq_cli.reports.github import REPORT as GITHUB
from rcq_cli.reports.junit import REPORT as JUNIT
from tests.unit.stored_runs import ask, outcomes, stored_run

SCHEMA = xmlschema.XMLSchema(Path(__file__).with_name("junit.xsd"))
NAIVE_8K = (8, 31, 0, 61)


@pytest.fixture
def folders(tmp_path) -> dict[str, str]:
    """Return runs that pass, fail, violate, break off and cannot be compared."""
    dense, naive = outcomes(*NAIVE_8K)
    made = {
        "dense": stored_run(tmp_path, "dense", dense),
        "naive": stored_run(tmp_path, "naive", naive, reason=" "),
        "good": stored_run(tmp_path, "kivi", dense, reason=" "),
        "violated": stored_run(tmp_path, "certified", dense, violations=2, reason=" "),
        "failed": stored_run(tmp_path, "quest", dense, failed=4, reason=" "),
        "other": stored_run(tmp_path, "snapkv", dense, fields={"model.id": "other"}),
    }
    return {name: str(folder) for name, folder in made.items()}


CASES = {
    "good": (0, {}),
    "naive": (3, {"failure": 1}),
    "violated": (4, {"failure": 1}),
    "failed": (6, {"error": 1}),
    "other": (5, {"error": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_junit_is_valid_and_its_counters_equal_its_children(name, folders, tmp_path, capsys):
    path = tmp_path / "junit.xml"
    code, found = CASES[name]
    argv = ("compare", folders["dense"], folders[name], "--expect", "naive=pass", "--junit", str(path))
    assert ask(capsys, *argv)[0] == code
    SCHEMA.validate(path)
    root = Xml.parse(path).getroot()
    for element in (root, *root.findall("testsuite")):
        cases = element.findall(".//testcase")
        assert int(element.get("tests")) == len(cases)
        for tag, counter in (("failure", "failures"), ("error", "errors"), ("skipped", "skipped")):
            assert int(element.get(counter)) == len(element.findall(f".//{tag}"))
    for tag in ("failure", "error"):
        assert bool(root.findall(f".//{tag}")) == bool(found.get(tag))
    if name == "violated":
        assert {f.get("type") for f in root.findall(".//failure")} == {"certificate"}
    assert "\x1b" not in path.read_text("utf-8")


def test_an_undecided_cell_is_skipped_and_a_failure_when_strict(tmp_path, capsys):
    dense, other = outcomes(64, 2, 2, 32)
    runs = (
        str(stored_run(tmp_path, "dense", dense)),
        str(stored_run(tmp_path, "certified", other, reason=" ")),
    )
    path = tmp_path / "junit.xml"
    for strict, tag in (((), "skipped"), (("--strict",), "failure")):
        ask(capsys, "compare", *runs, "--margin", "0.05", "--junit", str(path), *strict)
        SCHEMA.validate(path)
        (case,) = [c for c in Xml.parse(path).iter("testcase") if "verdict" in c.get("name")]
        assert case.find(tag) is not None
        assert "does not exclude a loss of 0.05" in case.find(tag).get("message")


def test_junit_carries_hashes_size_interval_and_seed(folders, tmp_path, capsys):
    path = tmp_path / "junit.xml"
    ask(capsys, "compare", folders["dense"], folders["naive"], "--junit", str(path))
    held = {p.get("name"): p.get("value") for p in Xml.parse(path).iter("property")}
    assert held["n.naive"] == "100"
    assert held["difference.naive"] == "[-0.406, -0.228]"
    assert held["seed"] == "0"
    assert len(held["contract"]) == len(held["mode_hash.naive"]) == 64


def test_text_that_xml_cannot_hold_is_replaced():
    gate = dict.fromkeys(("expr", "matched", "candidate", "task"), "a\x00\x1b<&\ufffe") | {"ctx": None}
    gate |= {"status": "fail", "code": 3, "reason": "\x07 & <b>", "value": 1}
    text = JUNIT.text({"contract": "c", "cells": [], "pairs": [], "gate": {"gates": [gate]}})
    SCHEMA.validate(text)
    assert "?" in text


@pytest.mark.parametrize("name", CASES)
def test_code_quality_lists_what_is_not_clean(name, folders, tmp_path, capsys):
    path = tmp_path / "quality.json"
    code, _ = CASES[name]
    argv = ("compare", folders["dense"], folders[name], "--expect", "naive=pass", "--code-quality", str(path))
    assert ask(capsys, *argv)[0] == code
    issues = json.loads(path.read_text("utf-8"))
    severities = {0: set(), 3: {"critical"}, 4: {"blocker"}, 5: {"major"}, 6: {"major"}}[code]
    assert severities <= {issue["severity"] for issue in issues}
    assert bool(severities) <= bool(issues)
    assert len({issue["fingerprint"] for issue in issues}) == len(issues)
    for issue in issues:
        assert set(issue) == {"description", "check_name", "fingerprint", "severity", "location"}
        assert issue["location"]["lines"]["begin"] == 1


def on_github(capsys, monkeypatch, folder: Path, *argv: str) -> tuple[int, str, str, dict[str, str]]:
    """Run `rcq compare` as a step of GitHub Actions; return code, stderr, summary and outputs."""
    summary, outputs = folder / "summary.md", folder / "outputs"
    for name, value in (("ACTIONS", "true"), ("STEP_SUMMARY", str(summary)), ("OUTPUT", str(outputs))):
        monkeypatch.setenv(f"GITHUB_{name}", value)
    code, _, err = ask(capsys, "compare", *argv, "--github")
    pairs = [line.partition("=") for line in outputs.read_text("utf-8").splitlines()]
    return code, err, summary.read_text("utf-8"), {name: value for name, _, value in pairs}


def test_a_failed_gate_on_github(folders, tmp_path, monkeypatch, capsys):
    argv = (folders["dense"], folders["naive"], "--expect", "naive=pass")
    code, err, summary, outputs = on_github(capsys, monkeypatch, tmp_path, *argv)
    assert code == 3
    assert "::error title=rcq::niah@8192 naive: difference -0.31 is below -0.15" in err.splitlines()
    assert "| 8k | naive | 0.390 | 0.080 | -0.310 [-0.406, -0.228] | 31/0 |" in summary
    assert {k: outputs[k] for k in ("verdict", "exit_code", "worst_cell")} == {
        "verdict": "fail",
        "exit_code": "3",
        "worst_cell": "niah@8192 naive",
    }
    assert len(outputs["contract"]) == 64


def test_a_comparison_that_breaks_off_on_github(folders, tmp_path, monkeypatch, capsys):
    code, err, summary, outputs = on_github(capsys, monkeypatch, tmp_path, folders["dense"], folders["other"])
    assert code == 5
    assert any(line.startswith("::error title=rcq::") and "model.id" in line for line in err.splitlines())
    assert "RCQ-CMP-01" in summary
    assert (outputs["verdict"], outputs["exit_code"]) == ("error", "5")


def test_a_clean_pass_on_github_annotates_nothing(folders, tmp_path, monkeypatch, capsys):
    code, err, summary, outputs = on_github(capsys, monkeypatch, tmp_path, folders["dense"], folders["good"])
    assert code == 0
    assert "::" not in err
    assert "PASSED" in summary
    assert outputs["verdict"] == "pass"


def test_github_has_no_effect_elsewhere(folders, monkeypatch, capsys):
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    code, _, err = ask(capsys, "compare", folders["dense"], folders["naive"], "--github")
    assert code == 0
    assert "::" not in err


def test_at_most_ten_annotations_of_a_level_the_worst_first():
    failures = [f"cell {i}" for i in range(25)]
    gate = {"failures": failures, "warnings": ["50 %\nleft"], "notices": []}
    lines = GITHUB.text({"gate": gate}).splitlines()
    errors = [line for line in lines if line.startswith("::error")]
    assert len(errors) == 10
    assert errors[0].endswith("::cell 0")
    assert "16 more" in errors[-1]
    assert lines[-1] == "::warning title=rcq::50 %25%0Aleft"


def test_a_summary_that_is_too_long_is_cut_with_a_pointer():
    text = GITHUB.step_summary("| a | row |\n" * 200_000, "result.json")
    assert len(text.encode()) < 1_000_000
    assert "result.json" in text[-200:]
    assert GITHUB.step_summary("short\n", None) == "short\n"


@pytest.mark.parametrize("flag", ["--junit", "--code-quality"])
@pytest.mark.parametrize("target", ["no/such/folder/x", "-", "."])
def test_a_report_that_cannot_be_written_is_refused_before_any_work(
    flag, target, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(capsys, "compare", "dense", "certified", flag, target)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert flag in err


def test_a_usage_error_found_late_still_leaves_the_reports(tmp_path, capsys):
    path = tmp_path / "junit.xml"
    code, _, _ = ask(capsys, "compare", "dense", "no-such-mode", "--junit", str(path))
    assert code == 2
    SCHEMA.validate(path)
    assert "no-such-mode" in path.read_text("utf-8")
