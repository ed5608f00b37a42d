"""The steps of the documented pipelines, read from their files and run as their servers would run them."""

import os
import re
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXPRESSION = re.compile(r"\$\{\{\s*(.+?)\s*\}\}")


class Step(NamedTuple):
    """One command of a pipeline."""

    command: str
    shell: tuple[str, ...] = ("sh", "-e", "-c")
    env: Mapping[str, str] = {}
    id: str = ""
    after_failure: bool = False


def gitlab_steps(path: Path) -> list[Step]:
    """Return the script of the one job of a GitLab file."""
    (job,) = yaml.safe_load(path.read_text("utf-8")).values()
    return [Step(command) for command in job["script"]]


def jenkins_steps(path: Path) -> list[Step]:
    """Return the `sh` steps of a Jenkinsfile."""
    return [Step(command) for command in re.findall(r"(?m)^\s*sh '([^']+)'$", path.read_text("utf-8"))]


class GitHubJob:
    """A job of a workflow that uses this repository's composite action."""

    def __init__(self, path: Path, folder: Path) -> None:
        (self.job,) = yaml.safe_load(path.read_text("utf-8"))["jobs"].values()
        self.action = yaml.safe_load((ROOT / "action.yml").read_text("utf-8"))
        self.outputs: dict[str, Path] = {}
        self.folder = folder
        self.summary = folder / "summary.md"

    def run(self, path_of_tools: str) -> int:
        """Run every `run` step in order as GitHub does; return the exit code of the first one that fails."""
        for step in self._steps():
            done = run_step(step, self.folder, path_of_tools, self._environment(step))
            if done.returncode:
                return done.returncode
        return 0

    def _steps(self) -> Iterator[Step]:
        for step in self.job["steps"]:
            if "run" in step:
                yield self._step(step, {})
            elif step["uses"].startswith("OWNER/rcq@"):
                given = {name: self._filled(text, {}) for name, text in step.get("with", {}).items()}
                assert set(given) <= set(self.action["inputs"])
                inputs = {name: entry["default"] for name, entry in self.action["inputs"].items()} | given
                yield from (self._step(s, inputs) for s in self.action["runs"]["steps"] if "run" in s)

    def _step(self, step: Mapping, inputs: Mapping[str, str]) -> Step:
        env = {name: self._filled(text, inputs) for name, text in step.get("env", {}).items()}
        # inputs may reach a script as variables only: text put into it could run
        assert not EXPRESSION.search(step["run"])
        return Step(
            step["run"], ("bash", "--noprofile", "--norc", "-eo", "pipefail", "-c"), env, step.get("id", "")
        )

    def _filled(self, text: str, inputs: Mapping[str, str]) -> str:
        return EXPRESSION.sub(lambda match: self._value(match[1], inputs), text)

    def _value(self, expression: str, inputs: Mapping[str, str]) -> str:
        group, _, rest = expression.partition(".")
        if group == "inputs":
            return inputs[rest]
        if group == "steps":
            step, _, name = rest.split(".")
            return self.read(step)[name]
        assert expression == "github.action_path", expression
        return str(ROOT)

    def _environment(self, step: Step) -> dict[str, str]:
        target = self.outputs.setdefault(
            step.id or step.command, self.folder / f"outputs-{len(self.outputs)}"
        )
        found = {"ACTIONS": "true", "STEP_SUMMARY": str(self.summary), "OUTPUT": str(target)}
        return {f"GITHUB_{name}": value for name, value in found.items()}

    def read(self, step: str) -> dict[str, str]:
        """Return what a step has written to its outputs."""
        pairs = [line.partition("=") for line in self.outputs[step].read_text("utf-8").splitlines()]
        return {name: value for name, _, value in pairs}


def run_step(
    step: Step, folder: Path, path_of_tools: str, more: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run one step in `folder` with the tools of a path before all others."""
    env = os.environ | {"PATH": f"{path_of_tools}:{os.environ['PATH']}"} | dict(step.env) | dict(more or {})
    return subprocess.run(
        [*step.shell, step.command],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


def run_steps(steps: list[Step], folder: Path, path_of_tools: str) -> int:
    """Run steps in order and return the exit code of the first one that fails."""
    for step in steps:
        done = run_step(step, folder, path_of_tools)
        if done.returncode:
            return done.returncode
    return 0
