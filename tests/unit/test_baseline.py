"""`--baseline`: what got worse fails, what got better is noticed, another contract is refused by name."""

import json
import shutil
from pathlib import Path

import pytest
import yaml

from rcq_cli.contract import LEVELS, Level
from rcq_cli.main import run
from tests.unit.stored_runs import ask, outcomes, stored_run

MUST = sorted(name for name, level in LEVELS.items() if level is Level.MUST)


RIGHT = [1.0] * 40
LOST = [0.0] * 12 + [1.0] * 28


def runs(folder: Path, dense=None, certified=None, **changes) -> list[str]:
    """Two finished runs of 40 samples; the candidate's answers differ from the reference's in text."""
    scores = RIGHT
    return [
        str(stored_run(folder, "dense", dense or scores, **changes)),
        str(stored_run(folder, "certified", certified or scores, reason=" ", violations=0, **changes)),
    ]


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Return a baseline in which both modes answer everything, with one of two samples beside it."""
    folder = tmp_path_factory.mktemp("accepted")
    for name, scores in (("rcq-baseline", RIGHT), ("two", [1.0, 1.0])):
        argv = ("compare", *runs(folder / f"runs-{name}", scores, scores), "-q")
        assert run((*argv, "--baseline", str(folder / f"{name}.yaml"), "--update-baseline")) == 0
    return folder


@pytest.fixture
def accepted(made, tmp_path) -> Path:
    """Return a copy of the baseline of 40 samples that a test may change."""
    for path in made.glob("rcq-baseline.*"):
        shutil.copy(path, tmp_path)
    return tmp_path / "rcq-baseline.yaml"


@pytest.fixture(scope="module")
def unchanged(tmp_path_factory) -> list[str]:
    """Return two runs that repeat what was accepted."""
    return runs(tmp_path_factory.mktemp("unchanged"))


def against(capsys, baseline: Path, *argv: str) -> tuple[int, dict, str]:
    code, out, err = ask(capsys, "compare", *argv, "--baseline", str(baseline), "--json")
    return code, json.loads(out), err


def test_the_file_has_the_documented_form(accepted):
    written = yaml.safe_load(accepted.read_text("utf-8"))
    assert written["schema"] == "rcq-baseline/1"
    assert len(written["contract_hash"]) == 64
    row = next(r for r in written["rows"] if (r["mode"], r["metric"]) == ("certified", "accuracy"))
    wanted = {"task": "niah", "sub": "", "ctx": 8192, "mode": "certified", "metric": "accuracy", "value": 1.0}
    assert row == wanted | {"n": 40, "dir": "up", "tol": {"kind": "stat", "margin": 0.15}}
    stored = (accepted.parent / written["outcomes"]).read_text("utf-8").splitlines()
    assert len(stored) == 80


def test_the_same_result_gives_the_same_bytes(unchanged, accepted, tmp_path, capsys):
    again = tmp_path / "again" / "rcq-baseline.yaml"
    again.parent.mkdir()
    ask(capsys, "compare", *unchanged, "--baseline", str(again), "--update-baseline")
    for path in (again, again.with_name("rcq-baseline.outcomes.jsonl")):
        assert path.read_bytes() == (accepted.parent / path.name).read_bytes()


def test_an_unchanged_result_passes(accepted, unchanged, capsys):
    code, document, err = against(capsys, accepted, *unchanged)
    assert code == 0
    assert "warning" not in err
    assert {p["candidate"]: p["verdict"] for p in document["baseline"]["pairs"]} == {
        "dense": "pass",
        "certified": "pass",
    }


def test_a_loss_against_the_baseline_fails_where_the_comparison_itself_passes(accepted, tmp_path, capsys):
    """Both modes lost the same 12 answers: side by side they are equal, against yesterday they are not."""
    scores = LOST
    code, document, err = against(capsys, accepted, *runs(tmp_path / "now", scores, scores))
    assert code == 3
    assert document["pairs"][0]["verdict"] == "pass"
    assert any("against baseline" in failure for failure in document["gate"]["failures"])
    assert "RCQ-CMP-13" in err


def test_an_improvement_is_a_notice_and_never_a_failure(unchanged, tmp_path, capsys):
    path = tmp_path / "b.yaml"
    before = runs(tmp_path / "before", LOST, LOST)
    assert ask(capsys, "compare", *before, "--baseline", str(path), "--update-baseline")[0] == 0
    code, document, err = against(capsys, path, *unchanged)
    assert code == 0
    assert [n for n in document["gate"]["notices"] if "accuracy is better than baseline (0.7, now 1)" in n]
    assert "--update-baseline keeps it" in err


def test_more_bytes_fail_and_fewer_are_noticed(unchanged, accepted, capsys):
    text = accepted.read_text("utf-8")
    now = unchanged
    accepted.write_text(text.replace("value: 100}", "value: 98}"), "utf-8")
    code, document, _ = against(capsys, accepted, *now)
    assert code == 3
    assert (
        "niah@8192 certified: against baseline: device_bytes was 98 and is 100"
        in document["gate"]["failures"]
    )
    accepted.write_text(text.replace("value: 100}", "value: 102}"), "utf-8")
    code, document, _ = against(capsys, accepted, *now)
    assert code == 0
    assert any("device_bytes is better" in notice for notice in document["gate"]["notices"])


@pytest.mark.parametrize("name", MUST)
def test_another_contract_is_5_and_names_the_field(name, made, tmp_path, capsys):
    """Every field that must agree, one by one; a run and a baseline that differ in it are never judged."""
    now = runs(tmp_path / "now", [1.0, 1.0], [1.0, 1.0], fields={name: "something else"})
    code, document, err = against(capsys, made / "two.yaml", *now)
    assert code == 5
    assert name in err
    assert document["baseline"]["pairs"] == []


def test_a_mismatch_can_be_allowed_and_then_nothing_passes(accepted, tmp_path, capsys):
    now = runs(tmp_path / "now", fields={"model.dtype": "float16"})
    code, out, err = ask(capsys, "compare", *now, "--baseline", str(accepted), "--allow-mismatch")
    assert code == 0
    assert out.count("DIFFERENT CONTRACTS") == 1
    assert "model.dtype (None and 'float16')" in err
    code, document, _ = against(capsys, accepted, *now, "--allow-mismatch")
    assert {p["verdict"] for p in document["baseline"]["pairs"]} == {"inconclusive"}


def test_a_row_that_was_not_measured_is_6_and_a_new_cell_a_notice(accepted, tmp_path, capsys):
    dense = stored_run(tmp_path / "now", "dense", RIGHT)
    other = stored_run(tmp_path / "now", "kivi", RIGHT, reason=" ")
    code, document, _ = against(capsys, accepted, str(dense), str(other))
    assert code == 6
    assert any("the comparison did not measure it" in text for text in document["gate"]["failures"])
    assert any("niah@8192 kivi is not in" in notice for notice in document["gate"]["notices"])


def test_times_of_runs_that_did_not_take_turns_are_never_held_against_it(unchanged, accepted, capsys):
    text = accepted.read_text("utf-8")
    place = "ctx: 8192, task: niah, sub: '', mode: certified, n: 40"
    row = f"- {{{place}, metric: latency_ratio, dir: down, tol: {{kind: rel, value: 0.1}}, value: 0.001}}\n"
    accepted.write_text(text + row, "utf-8")
    code, document, _ = against(capsys, accepted, *unchanged)
    assert code == 0
    assert any("latency_ratio is not held against" in notice for notice in document["gate"]["notices"])


def test_modes_that_are_there_to_fail_get_no_row(tmp_path, capsys):
    dense, naive = outcomes(8, 31, 0, 61)
    folders = [
        str(stored_run(tmp_path, "dense", dense)),
        str(stored_run(tmp_path, "naive", naive, reason=" ")),
    ]
    path = tmp_path / "b.yaml"
    assert ask(capsys, "compare", *folders, "--baseline", str(path), "--update-baseline")[0] == 0
    assert {row["mode"] for row in yaml.safe_load(path.read_text("utf-8"))["rows"]} == {"dense"}


@pytest.mark.parametrize(("code", "change"), [(4, {"violations": 2}), (6, {"failed": 3})])
def test_a_broken_comparison_never_becomes_the_baseline(code, change, accepted, tmp_path, capsys):
    before = accepted.read_bytes()
    dense = stored_run(tmp_path / "now", "dense", RIGHT)
    other = stored_run(tmp_path / "now", "certified", RIGHT, reason=" ", **change)
    argv = (str(dense), str(other), "--baseline", str(accepted), "--update-baseline")
    got, _, err = ask(capsys, "compare", *argv)
    assert got == code
    assert "left as it was" in err
    assert accepted.read_bytes() == before


def test_a_result_document_is_a_baseline_that_can_fail_and_not_pass(unchanged, tmp_path, capsys):
    path = tmp_path / "result.json"
    ask(capsys, "compare", *unchanged, "--json", str(path))
    code, document, _ = against(capsys, path, *unchanged)
    assert code == 0
    statuses = {g["status"] for g in document["gate"]["gates"] if "worse than baseline by 0.15" in g["expr"]}
    assert statuses == {"inconclusive"}
    scores = [0.0] * 30 + [1.0] * 10
    assert against(capsys, path, *runs(tmp_path / "worse", scores, scores))[0] == 3
    assert against(capsys, path, *runs(tmp_path / "other", fields={"model.id": "x"}))[0] == 5


BROKEN = {
    "nothing": "",
    "a list": "- 1\n",
    "no yaml": "{[",
    "deep": "[" * 1500,
    "another schema": "schema: rcq-baseline/9\nrows: []\n",
    "no rows": f"schema: rcq-baseline/1\ncontract_hash: {'0' * 64}\nrows: []\n",
    "an unknown key": f"schema: rcq-baseline/1\ncontract_hash: {'0' * 64}\nrowz: []\n",
    "a broken date": "schema: 2001-99-99\n",
    "an unfinished document": '{"command": "compare", "schema": 1, "error": {}}',
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN.keys())
def test_what_is_no_baseline_is_a_usage_error_before_any_work(text, tmp_path, capsys):
    path = tmp_path / "b.yaml"
    path.write_text(text, "utf-8")
    code, out, err = ask(capsys, "compare", "dense", "certified", "--baseline", str(path))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "RCQ-USE-27" in err


@pytest.mark.parametrize("score", ["most", True, [], 1e999])
def test_a_result_document_with_a_score_that_is_no_number_is_no_baseline(score, unchanged, tmp_path, capsys):
    path = tmp_path / "result.json"
    ask(capsys, "compare", *unchanged, "--json", str(path))
    document = json.loads(path.read_text("utf-8"))
    document["cells"][1]["score"] = score
    path.write_text(json.dumps(document), "utf-8")
    code, out, err = ask(capsys, "compare", *unchanged, "--baseline", str(path))
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert "row" in err


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("outcomes: rcq-baseline.outcomes.jsonl", "outcomes: ''"),
        ("kind: stat", "kind: some"),
        ("margin: 0.15", "margin: 0"),
        ("margin: 0.15", "margin: 1e-320"),
        ("margin: 0.15", "margin: .nan"),
        ("dir: up", "dir: north"),
        ("n: 40", "n: 0"),
        ("ctx: 8192, dir", "ctx: wide, dir"),
        ("value: 100}", "value: .inf}"),
        ("outcomes_sha256: ", "outcomes_sha256: a"),
        ("outcomes: rcq", "outcomes: ../rcq"),
        ("metric: device_bytes", "metric: accuracy"),
        ("model.id", "mode.id"),
    ],
)
def test_a_row_that_makes_no_sense_is_a_usage_error(old, new, accepted, capsys):
    text = accepted.read_text("utf-8")
    assert old in text
    accepted.write_text(text.replace(old, new), "utf-8")
    code, out, err = ask(capsys, "compare", "dense", "certified", "--baseline", str(accepted))
    assert (code, out, len(err.splitlines())) == (2, "", 1)


@pytest.mark.parametrize(
    "argv",
    [
        ("--update-baseline",),
        ("--baseline", "b.json", "--update-baseline"),
        ("--baseline", "no/where/b.yaml", "--update-baseline"),
        ("--baseline", "none.yaml"),
    ],
)
def test_flags_that_cannot_be_meant_are_refused_before_any_work(argv, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    code, out, err = ask(capsys, "compare", "dense", "certified", *argv)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
