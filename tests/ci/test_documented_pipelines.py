"""The pipelines of docs/ci.md and examples/ci, run step by step on a good and on a bad pull request."""

import json
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import xmlschema
import yaml

from tests.ci.steps import ROOT, GitHubJob, gitlab_steps, jenkins_steps, run_steps

EXAMPLE = ROOT / "examples" / "ci"
REPORTS = ("rcq.json", "junit.xml", "code-quality.json")
PULL_REQUESTS = {"smaller-budget": (0, "pass"), "no-checks": (3, "fail")}
BLOCK = re.compile(r"<!-- (examples/ci/\S+) -->\n```\w+\n(.*?)\n```", re.DOTALL)


@pytest.fixture(scope="module")
def tools(tmp_path_factory) -> str:
    """Return a folder with an `rcq` that keeps its runs for the next pipeline, and a `python` without pip.

    What is measured once per pull request is taken up again by `--resume`; every pipeline still judges,
    writes its reports and leaves by its own exit code.
    """
    folder = tmp_path_factory.mktemp("tools")
    runs = tmp_path_factory.mktemp("runs")
    program = f"{sys.executable} -m rcq_cli"
    scripts = {
        "rcq": f'exec env PYTHONPATH="{ROOT}" {program} "$@" --out "{runs}" --resume\n',
        "python": 'case "$*" in *"pip install"*) exit 0;; esac\nexit 9\n',
    }
    for name, text in scripts.items():
        path = folder / name
        path.write_text(f"#!/bin/sh\n{text}", "utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(folder)


@pytest.fixture(params=PULL_REQUESTS)
def pull_request(request, tmp_path) -> tuple[str, Path]:
    """Return the example with one pull request applied, as a server would check it out."""
    folder = tmp_path / "service"
    shutil.copytree(EXAMPLE, folder)
    patch = folder / "pull-requests" / f"{request.param}.patch"
    subprocess.run(["patch", "-p1", "-i", str(patch)], cwd=folder, check=True, capture_output=True)
    return request.param, folder


def check_reports(folder: Path, code: int, verdict: str, names=REPORTS) -> None:
    for name in names:
        assert (folder / "reports" / name).is_file()
    document = json.loads((folder / "reports" / "rcq.json").read_text("utf-8"))
    assert document["exit_code"] == code
    assert [pair["verdict"] for pair in document["pairs"]] == [verdict]
    schema = xmlschema.XMLSchema(ROOT / "tests" / "unit" / "junit.xsd")
    schema.validate(folder / "reports" / "junit.xml")


@pytest.mark.slow
@pytest.mark.parametrize(("file", "read"), [("gitlab.yml", gitlab_steps), ("Jenkinsfile", jenkins_steps)])
def test_the_gate_stops_the_bad_pull_request_and_leaves_reports_either_way(file, read, pull_request, tools):
    name, folder = pull_request
    steps = read(folder / file)
    assert [step.command for step in steps][-1] == "sh gate.sh"
    code, verdict = PULL_REQUESTS[name]
    assert run_steps(steps, folder, tools) == code
    check_reports(folder, code, verdict)


@pytest.mark.slow
def test_the_action_stops_the_bad_pull_request_and_leaves_reports_either_way(pull_request, tools):
    name, folder = pull_request
    job = GitHubJob(folder / "github.yml", folder)
    code, verdict = PULL_REQUESTS[name]
    assert job.run(tools) == code
    check_reports(folder, code, verdict, REPORTS[:2])
    outputs = job.read("compare")
    assert (outputs["verdict"], outputs["exit_code"]) == (verdict, str(code))
    assert ("FAILED" if code else "PASSED") in job.summary.read_text("utf-8")


@pytest.mark.slow
def test_the_action_passes_every_input_on(tmp_path, tools):
    """Gates come one a line with blanks in them, and a gate that is never evaluated is a usage error."""
    workflow = yaml.safe_load((EXAMPLE / "github.yml").read_text("utf-8"))
    uses = next(s for s in workflow["jobs"]["gate"]["steps"] if s.get("id") == "rcq")
    uses["with"]["fail-on"] = "niah.accuracy.upper < -0.9\nniah.accuracy.lower > 2\nruler.accuracy.n < 1\n"
    (tmp_path / "w.yml").write_text(yaml.safe_dump(workflow), "utf-8")
    (tmp_path / "kv-cache.txt").write_text("certified\n", "utf-8")
    job = GitHubJob(tmp_path / "w.yml", tmp_path)
    assert job.run(tools) == 2
    assert "unknown task" in job.summary.read_text("utf-8")
    assert (tmp_path / "reports" / "junit.xml").is_file()


def test_the_documentation_shows_the_files_as_they_are():
    shown = dict(BLOCK.findall((ROOT / "docs" / "ci.md").read_text("utf-8")))
    names = {"gate.sh", "github.yml", "gitlab.yml", "Jenkinsfile"}
    assert shown == {f"examples/ci/{n}": (EXAMPLE / n).read_text("utf-8").rstrip("\n") for n in names}


def test_a_server_keeps_the_reports_also_of_a_failed_job():
    (job,) = yaml.safe_load((EXAMPLE / "gitlab.yml").read_text("utf-8")).values()
    assert job["artifacts"]["when"] == "always"
    assert job["artifacts"]["reports"] == {
        "junit": "reports/junit.xml",
        "codequality": "reports/code-quality.json",
    }
    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    upload = next(step for step in action["runs"]["steps"] if "uses" in step)
    assert upload["if"] == "always()"
    jenkins = (EXAMPLE / "Jenkinsfile").read_text("utf-8")
    assert "always {\n      junit 'reports/junit.xml'" in jenkins


def test_every_output_of_the_action_is_one_that_rcq_writes():
    from rcq_cli.reports.github import REPORT

    action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
    document = {"exit_code": 5, "error": {"id": "x", "what": "y", "why": "", "fix": ""}}
    written = {line.partition("=")[0] for line in REPORT.outputs(document).splitlines()}
    wanted = {re.search(r"outputs\.(\w+)", entry["value"])[1] for entry in action["outputs"].values()}
    assert wanted == written


def test_the_gate_script_is_executable():
    assert os.access(EXAMPLE / "gate.sh", os.X_OK)
