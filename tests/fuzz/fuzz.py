"""Inputs that nobody meant, thrown at the command line: `python -m tests.fuzz.fuzz --count 10000`.

Every input follows from the seed and its number, so a finding is repeated by `--first N --count 1`. An input
is a finding when the command ends with 1 (a defect), prints a traceback, raises, or takes longer than the
limit. Work is cut off where it would begin: what is tried is everything that reads what a user wrote.
"""

import argparse
import collections
import contextlib
import io
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from unittest import mock

from rcq_cli.errors import UnsupportedHere
from rcq_cli.main import run
from tests.unit.stored_runs import stored_run

SECONDS = 20
"""Longest time of one input, of this process alone; an ordinary one takes some milliseconds."""
WAITING = 300
"""Longest time by the clock: a busy machine may take its time, an input that waits for nothing may not."""
ALLOWED = {0, 2, 3, 4, 5, 6, 7, 130}

COMMANDS = ("eval", "compare", "profile", "trace", "models", "corpora", "report", "modes", "tasks")
FLAGS = (
    *("--model", "--task", "--ctx", "--mode", "--samples", "--seed", "--backend", "--device", "--dtype"),
    *(
        "--preset",
        "-O",
        "-T",
        "--executor",
        "--out",
        "--resume",
        "--fresh",
        "-o",
        "--json",
        "--dry-run",
        "-q",
        "-v",
    ),
    *(
        "--audit",
        "--max-errors",
        "--keep-prompts",
        "--allow-inactive",
        "--rescore",
        "--shard",
        "--merge",
        "--match",
    ),
    *(
        "--fail-on",
        "--strict",
        "--exit-zero",
        "--baseline",
        "--update-baseline",
        "--allow-mismatch",
        "--expect",
    ),
    *(
        "--noise-floor",
        "--junit",
        "--github",
        "--code-quality",
        "--latency-margin",
        "--flip-margin",
        "--margin",
    ),
    *(
        "--alpha",
        "--interval",
        "--midp",
        "--cluster",
        "--partial",
        "--max-missing",
        "--breakdown",
        "--geometry",
        "--attribution",
        "--color",
    ),
    *("--ascii", "--help", "--version", "--step", "--layer", "--head", "--rung", "--format", "--to", "--"),
)
WORDS = (
    *(
        "dense",
        "naive",
        "certified",
        "recas",
        "kivi",
        "certified:eps=0.1",
        "certified:eps=-1",
        "snapkv:",
        ":",
        "niah",
    ),
    *(
        "ruler/vt",
        "ppl",
        "longbench",
        "recas-traces",
        "needle",
        "needle-hard",
        "needle:heads=x",
        "smoke",
        "ci",
    ),
    *(
        "4k",
        "1m",
        "0",
        "-1",
        "1e9",
        "99999999999999999999",
        "nan",
        "inf",
        "1e999",
        "0.5",
        "",
        " ",
        ",",
        "a,b",
        "4k,4k",
    ),
    *(
        "eps=0.1",
        "eps",
        "=",
        "eps==",
        "eps=nan",
        "controls=off",
        "gen=0",
        "decoys=999999",
        "depths=::",
        "a/b",
        ".",
        "..",
    ),
    *(
        "/dev/null",
        "no/such/x.yaml",
        "x.yaml",
        "x.py",
        "show",
        "export",
        "diff",
        "list",
        "json",
        "csv",
        "table",
    ),
    *(
        "niah@4k.accuracy.upper < -0.02",
        "*.critical.candidate > 3",
        "a.b.c",
        "naive=fail",
        "bytes=0.5",
        "1/2",
        "0/0",
    ),
    *(
        "\u00e9\u4e2d\U0001f600",
        "\udcff",
        "--",
        "-",
        "%s%n{}",
        "a" * 5000,
        "\x1b[31m",
        "x\ny",
        "cuda:99",
        "auto",
    ),
)
JUNK = (
    *(None, True, False, 0, -1, 1, 2**63, 10**30, 0.5, -0.0, 1e308, float("nan"), float("inf")),
    *(
        "",
        "x",
        "ok",
        "\u00e9",
        "\udcff",
        "a" * 300,
        [],
        {},
        [None],
        [[]],
        {"": None},
        {"a": {"b": []}},
        [1, 2, 3],
    ),
)
TASK = """task: capitals
dataset_path: json
dataset_kwargs: {data_files: {test: records.jsonl}}
doc_to_text: "{{passage}} What is the capital of {{country}}?"
doc_to_target: answers
output_type: generate_until
generation_kwargs: {max_gen_toks: 16, until: ["\\n"]}
metric_list:
  - {metric: exact_match, aggregation: mean, higher_is_better: true, ignore_case: true}
rcq: {context: passage, samples: 2, margin: 0.1}
"""
RECORDS = '{"passage": "Paris is old.", "country": "France", "answers": ["Paris"]}\n' * 3
SETTINGS = """preset = "smoke"
model = "needle"
tasks = ["niah"]
ctx = ["4k"]
samples = 5
seed = 1
audit = 0.5
[mode_options.certified]
eps = 0.1
[task_options.niah]
decoys = 4
"""
PRESET = """summary: for the fuzzer
tasks: [niah, ppl]
modes: [dense, certified]
ctx: [1k, 4k]
samples: {niah: 3}
audit: 0.5
mode_options: {certified: {eps: 0.1}}
task_options: {niah: {gen: 16}}
"""


class Hang(BaseException):
    """An input took longer than the limit."""


class Finding(NamedTuple):
    """One input that was not answered as it should be."""

    number: int
    kind: str
    argv: list[str]
    what: str


class Ground:
    """A folder of sound inputs from which broken ones are made."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        scores = [1.0, 0.0, 1.0]
        self.runs = [
            stored_run(folder / "runs", "dense", scores),
            stored_run(folder / "runs", "certified", [1.0, 1.0, 1.0], reason=" ", violations=0),
        ]
        (folder / "sound").mkdir()
        (folder / "work").mkdir()
        names = [str(run) for run in self.runs]
        import torch  # noqa: F401  its import takes seconds, which are no hang of the first input that needs it

        self.baseline, self.document = folder / "sound" / "b.yaml", folder / "sound" / "b.json"
        with quiet():
            run(["compare", *names, "--baseline", str(self.baseline), "--update-baseline"])
            run(["compare", *names, "--json", str(self.document)])

    def fresh(self) -> Path:
        """Return an empty folder for the next input."""
        work = self.folder / "work"
        shutil.rmtree(work)
        work.mkdir()
        return work


# -- kinds of input -----------------------------------------------------------------------------------------


def arguments(random: random.Random, ground: Ground) -> list[str]:
    """Return a random command line."""
    ground.fresh()
    argv = [random.choice(COMMANDS)] if random.random() < 0.95 else []
    for _ in range(random.randrange(8)):
        kind = random.random()
        if kind < 0.55:
            argv.append(random.choice(FLAGS))
            if random.random() < 0.8:
                argv.append(random.choice(WORDS))
        elif kind < 0.9:
            argv.append(random.choice(WORDS))
        else:
            argv.append(mutated(random, random.choice(WORDS + FLAGS)[:80]))
    return argv


def yaml_task(random: random.Random, ground: Ground) -> list[str]:
    """Return a command that reads a broken YAML task with broken records."""
    work = ground.fresh()
    write(work / "mine.yaml", broken_text(random, TASK))
    write(work / "records.jsonl", RECORDS if random.random() < 0.5 else broken_text(random, RECORDS))
    path = str(work / "mine.yaml")
    return random.choice(
        [
            ["tasks", path],
            ["eval", "--task", path, "--dry-run"],
            ["compare", "dense", "naive", "--task", path],
        ]
    )


def settings(random: random.Random, ground: Ground) -> list[str]:
    """Return a command under a broken settings file."""
    write(ground.fresh() / "rcq.toml", broken_text(random, SETTINGS))
    return random.choice([["eval"], ["compare"], ["eval", "--dry-run"], ["profile"]])


def preset(random: random.Random, ground: Ground) -> list[str]:
    """Return a command that reads a broken preset."""
    write(ground.fresh() / "broken.yaml", broken_text(random, PRESET))
    return random.choice([["compare", "--preset", "broken"], ["eval", "--preset", "broken", "--dry-run"]])


def run_folder(random: random.Random, ground: Ground) -> list[str]:
    """Return a command that reads a run of which one file or two were broken."""
    work = ground.fresh()
    copies = []
    for source in ground.runs:
        shutil.copytree(source, work / source.name)
        copies.append(work / source.name)
    for _ in range(random.choice((1, 1, 2))):
        break_file(random, random.choice(sorted(random.choice(copies).iterdir())))
    names = [str(copy) for copy in copies]
    page = str(work / "page.html")
    return random.choice(
        [
            *[["compare", *names]] * 3,
            ["compare", *names, "--allow-mismatch", "--partial", "--junit", str(work / "j.xml")],
            ["compare", *names, "--noise-floor", names[0], "-o", "md"],
            ["report", *names, "-o", page],
            ["trace", "show", names[1]],
            ["trace", "export", names[1], "--format", "jsonl"],
            ["eval", "--rescore", names[0], "--out", str(work / "out")],
            ["eval", "--merge", *names, "--out", str(work / "out")],
        ]
    )


def baseline(random: random.Random, ground: Ground) -> list[str]:
    """Return a comparison against a broken baseline or result document."""
    work = ground.fresh()
    for path in (ground.baseline, ground.baseline.with_name("b.outcomes.jsonl"), ground.document):
        shutil.copy(path, work)
    used = random.choice(("b.yaml", "b.json"))
    broken = random.choice(("b.yaml", "b.outcomes.jsonl")) if used == "b.yaml" else used
    if broken == "b.yaml":
        write(work / broken, broken_text(random, (work / broken).read_text("utf-8")))
    else:
        break_file(random, work / broken)
    if random.random() < 0.5:
        unsealed = (work / "b.yaml").read_bytes().split(b"\n")
        (work / "b.yaml").write_bytes(b"\n".join(x for x in unsealed if not x.startswith(b"outcomes_sha256")))
    return ["compare", *map(str, ground.runs), "--baseline", str(work / used)]


Maker = Callable[[random.Random, Ground], list[str]]
KINDS: dict[str, tuple[Maker, int]] = {
    "arguments": (arguments, 40),
    "yaml-task": (yaml_task, 15),
    "settings": (settings, 10),
    "preset": (preset, 10),
    "run-folder": (run_folder, 15),
    "baseline": (baseline, 10),
}
"""Each kind of input and how many of a hundred are of it."""


# -- breaking things ----------------------------------------------------------------------------------------


def write(path: Path, text: str) -> None:
    path.write_bytes(text.encode("utf-8", "surrogateescape"))


def mutated(random: random.Random, text: str) -> str:
    """Return `text` with some characters dropped, doubled, swapped or replaced."""
    letters = list(text)
    for _ in range(random.randrange(1, 5)):
        at = random.randrange(len(letters) + 1)
        action = random.randrange(4)
        if action == 0:
            del letters[at : at + random.randrange(1, 9)]
        elif action == 1:
            letters[at:at] = letters[at : at + random.randrange(1, 30)]
        elif action == 2:
            letters[at:at] = random.choice("{}[]:,\"'\n\t -#&*!|>%@`0123456789.\x00\udcff\u00e9=<")
        else:
            letters[at : at + 1] = random.choice("{}[]:,\n 0-")
    return "".join(letters)


def broken_text(random: random.Random, text: str) -> str:
    """Return a text file that was edited badly: by characters, by lines or by values."""
    kind = random.random()
    if kind < 0.4:
        return mutated(random, text)
    lines = text.splitlines(keepends=True)
    at = random.randrange(len(lines))
    if kind < 0.6:
        lines[at] = lines[at].partition(random.choice(":="))[0] + f": {json.dumps(random.choice(JUNK))}\n"
    elif kind < 0.75:
        lines[at] = random.choice(lines)
    elif kind < 0.9:
        words = lines[at].split(" ")
        words[random.randrange(len(words))] = random.choice(WORDS)[:200]
        lines[at] = " ".join(words)
    elif kind < 0.95:
        del lines[at:]
    else:
        return random.choice(
            (
                "",
                "[" * 3000,
                "{a: " * 800,
                "\x00" * 50,
                "\udcff\udcfe",
                "- &a [*a]\n",
                "? x\n",
                "--- !!python/x\n",
            )
        )
    return "".join(lines)


def break_file(random: random.Random, path: Path) -> None:
    """Break a JSON or JSONL file: a value or key of it, or its bytes; or put something else in its place."""
    kind = random.random()
    if kind < 0.05:
        path.unlink()
        return
    if kind < 0.08:
        path.unlink()
        path.mkdir()
        return
    text = path.read_text("utf-8")
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    if kind < 0.3 or not lines:
        write(path, broken_text(random, text or "{}\n"))
        return
    at = random.randrange(len(lines))
    with contextlib.suppress(ValueError):
        lines[at] = json.dumps(with_junk(random, json.loads(lines[at])))
    write(path, "\n".join(lines) + "\n")


def with_junk(random: random.Random, value: object) -> object:
    """Return a JSON value in which one place holds something else."""
    if isinstance(value, dict) and value and random.random() < 0.9:
        name = random.choice(sorted(value))
        if random.random() < 0.15:
            return {k: v for k, v in value.items() if k != name}
        return value | {name: with_junk(random, value[name])}
    if isinstance(value, list) and value and random.random() < 0.7:
        at = random.randrange(len(value))
        return [*value[:at], with_junk(random, value[at]), *value[at + 1 :]]
    return random.choice(JUNK)


# -- trying -------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def quiet() -> Iterator[io.StringIO]:
    said = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        yield said


def _no_work(*_args: object, **_kwargs: object) -> None:
    raise UnsupportedHere("no work is done here", "the fuzzer stops in front of it", "none", "RCQ-ENV-01")


def _no_network(*_args: object, **_kwargs: object) -> None:
    raise OSError("the fuzzer has no network and starts no program")


@contextlib.contextmanager
def harmless(ground: Ground) -> Iterator[None]:
    """Cut off models, measurements, network and other programs; settings and presets come from the ground."""
    from rcq_cli import settings as reader
    from rcq_cli import sources
    from rcq_cli.commands import _dry_run, _profile, _run

    resolve, files = sources.resolve, reader.files
    work = ground.folder / "work"

    def resolved(name: str) -> tuple[object, str]:
        source, reference = resolve(name)
        stub = mock.Mock(wraps=source)
        stub.load = _no_work
        return stub, reference

    def presets(package: str) -> object:
        return work if (work / "broken.yaml").is_file() else files(package)

    before = Path.cwd()
    with contextlib.ExitStack() as stack:
        for owner, name, new in (
            (_run, "carry_out", _no_work),
            (_dry_run, "_trials", _no_work),
            (_profile, "model_places", _no_work),
            (_profile, "layer_places", _no_work),
            (sources, "resolve", resolved),
            (reader, "files", presets),
            (socket.socket, "connect", _no_network),
            (subprocess, "Popen", _no_network),
        ):
            stack.enter_context(mock.patch.object(owner, name, new))
        home = {"HF_HUB_OFFLINE": "1", "RCQ_HOME": str(ground.folder / "home"), "TMPDIR": str(ground.folder)}
        stack.enter_context(mock.patch.dict(os.environ, home))
        os.chdir(work)
        stack.callback(os.chdir, before)
        yield


def attempt(number: int, seed: int, ground: Ground, only: str | None = None) -> tuple[str, Finding | None]:
    """Try input `number`; return its kind and what is wrong with the answer."""
    chance = random.Random(f"{seed}|{number}")
    names = list(KINDS)
    kind = only or chance.choices(names, [KINDS[name][1] for name in names])[0]
    argv = KINDS[kind][0](chance, ground)
    start = time.perf_counter()
    with harmless(ground), quiet() as said:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        signal.alarm(WAITING)
        try:
            code = run(argv)
            what = "" if code in ALLOWED else f"exit code {code}"
        except Hang:
            what = f"took longer than {time.perf_counter() - start:.0f} s"
        except BaseException as error:  # noqa: BLE001  nothing may escape, whatever it is
            what = f"raised {error!r}"
        finally:
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.alarm(0)
    text = said.getvalue()
    if not what and "Traceback" in text:
        what = "a traceback"
    return kind, Finding(number, kind, argv, f"{what}\n{text[-1500:]}") if what else None


def fuzz(
    count: int, seed: int, first: int = 0, only: str | None = None
) -> tuple[dict[str, int], list[Finding]]:
    """Try `count` inputs; return how many there were of each kind, and the findings."""

    def stop(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
        raise Hang

    before = {number: signal.signal(number, stop) for number in (signal.SIGALRM, signal.SIGPROF)}
    counts: collections.Counter[str] = collections.Counter()
    findings = []
    try:
        with tempfile.TemporaryDirectory() as folder:
            tempfile.tempdir = folder  # tracebacks of defects are saved there, and shown with --debug
            ground = Ground(Path(folder))
            for number in range(first, first + count):
                kind, finding = attempt(number, seed, ground, only)
                counts[kind] += 1
                findings += [finding] if finding else []
    finally:
        tempfile.tempdir = None
        for number, handler in before.items():
            signal.signal(number, handler)
    return dict(counts), findings


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", choices=KINDS)
    asked = parser.parse_args()
    start = time.perf_counter()
    counts, findings = fuzz(asked.count, asked.seed, asked.first, asked.only)
    for finding in findings:
        sys.stdout.write(f"#{finding.number} {finding.kind}: {finding.argv!r:.600}\n  {finding.what}\n")
    shares = ", ".join(f"{kind} {count}" for kind, count in sorted(counts.items()))
    took = time.perf_counter() - start
    sys.stdout.write(f"{sum(counts.values())} inputs ({shares}) in {took:.0f} s, {len(findings)} findings\n")
    return 1 if findings else 0


if __name__ == "__main__":
    raise SystemExit(main())
