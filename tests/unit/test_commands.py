"""`rcq eval` from stored runs to table, document and exit code; the lists, the doctor and the dry run."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rcq_cli.commands import _run
from rcq_cli.commands._dry_run import Trial, extended
from rcq_cli.engine.decoder import Engine
from rcq_cli.progress import Progress
from tests.unit.stored_runs import ask, stored_run

# -- eval ---------------------------------------------------------------------------------------------------


class StoredExecutor:
    """An executor whose runs are there already."""

    def __init__(self, *folders: Path, stop: bool = False) -> None:
        self.folders, self.stop, self.asked = folders, stop, None

    def unsupported(self) -> str | None:
        return None

    def run(self, batches, *, out: Path, resume: bool, progress: Progress) -> tuple[Path, ...]:
        progress.note("answered from stored runs")
        self.asked = (batches, out, resume)
        if self.stop:
            raise KeyboardInterrupt
        return self.folders


class OneExecutor:
    def __init__(self, executor) -> None:
        self.executor = executor

    def load(self, name: str):
        assert name == "local"
        return self.executor


def with_executor(monkeypatch: pytest.MonkeyPatch, executor) -> None:
    monkeypatch.setattr(_run, "EXECUTORS", OneExecutor(executor))


def test_eval_answers_with_the_stored_cell(tmp_path, capsys, monkeypatch):
    folder = stored_run(tmp_path, "certified", [1.0] * 95 + [0.0] * 5, violations=0)
    with_executor(monkeypatch, executor := StoredExecutor(folder))
    code, out, _ = ask(capsys, "eval", "--ctx", "8k", "--samples", "100", "--json", "--out", str(tmp_path))
    document = json.loads(out)
    assert (code, document["exit_code"], document["run"]) == (0, 0, str(folder))
    (cell,) = document["cells"]
    assert cell["score"] == 0.95
    assert cell["score_ci"] == pytest.approx([0.88825, 0.97846], abs=1e-5)
    assert cell["bytes"]["device_ratio"] == 0.5
    batches, place, resume = executor.asked
    assert (batches[0][0].ctx, batches[0][0].samples, place, resume) == (8192, 100, tmp_path, False)


def test_eval_shows_the_heatmap_with_numbers(tmp_path, capsys, monkeypatch):
    # samples 0, 11 and 22 stand at depth 0; one of the three is lost
    scores = [0.0 if i == 11 else 1.0 for i in range(33)]
    with_executor(monkeypatch, StoredExecutor(stored_run(tmp_path, "certified", scores, samples=33)))
    _, out, _ = ask(capsys, "eval", "--ctx", "8k")
    lines = {words[0]: words[1:] for line in out.splitlines() if (words := line.split())}
    assert lines["depth"] == ["8k"]
    assert lines["0%"] == ["0.67"]
    assert lines["100%"] == ["1.00"]
    assert "n=3 in each cell" in out


@pytest.mark.parametrize(
    ("problem", "flags", "code"),
    [
        (
            {"code": 4, "kind": "violation", "what": "3 audited head-steps above their bound", "count": 3},
            (),
            4,
        ),
        ({"code": 6, "kind": "inactive", "what": "the mode did nothing", "count": 1}, (), 6),
        (
            {"code": 6, "kind": "inactive", "what": "the mode did nothing", "count": 1},
            ("--allow-inactive",),
            0,
        ),
        ({"code": 6, "kind": "control_no_needle", "what": "a leak", "count": 1}, ("--allow-inactive",), 6),
        ({"code": 6, "kind": "sample_errors", "what": "2 of 9 failed", "count": 2}, ("--max-errors", "1"), 6),
        ({"code": 6, "kind": "sample_errors", "what": "2 of 9 failed", "count": 2}, ("--max-errors", "2"), 0),
    ],
)
def test_the_problems_of_a_run_decide_the_exit_code(problem, flags, code, tmp_path, capsys, monkeypatch):
    folder = stored_run(tmp_path, "certified", [1.0] * 9, problems=[problem], samples=9)
    with_executor(monkeypatch, StoredExecutor(folder))
    got, out, err = ask(capsys, "eval", *flags)
    assert got == code
    assert out
    assert (problem["what"] in err) == (code != 0)


ASKED = {"origins": {"samples": "flag"}, "samples": 30}


@pytest.mark.parametrize("quiet", [(), ("-q",)])
@pytest.mark.parametrize("command", ["eval", "trace"])
def test_fewer_samples_than_asked_for_are_a_warning_that_stays(command, quiet, tmp_path, capsys, monkeypatch):
    with_executor(monkeypatch, StoredExecutor(stored_run(tmp_path, "certified", [1.0] * 3, **ASKED)))
    code, out, err = ask(capsys, command, "--json", *quiet)
    (warning,) = json.loads(out)["warnings"]
    assert code == 0
    assert warning.startswith("30 samples at 8192 tokens were asked for, but niah has 3: ")
    assert f"warning: {warning}\n" in err


def test_a_comparison_says_once_that_samples_are_missing(tmp_path, capsys):
    runs = [str(stored_run(tmp_path, mode, [1.0] * 3, **ASKED)) for mode in ("dense", "naive")]
    _, out, _ = ask(capsys, "compare", *runs, "--json")
    assert [text.split(",")[0] for text in json.loads(out)["warnings"]] == [
        "30 samples at 8192 tokens were asked for"
    ]


@pytest.mark.parametrize("origin", ["default", "preset"])
def test_a_size_that_nobody_asked_for_is_not_missed(origin, tmp_path, capsys, monkeypatch):
    folder = stored_run(tmp_path, "certified", [1.0] * 3, samples=30, origins={"samples": origin})
    with_executor(monkeypatch, StoredExecutor(folder))
    _, out, _ = ask(capsys, "eval", "--json")
    assert json.loads(out)["warnings"] == []


def test_a_violation_outranks_failed_samples(tmp_path, capsys, monkeypatch):
    both = [
        {"code": 6, "kind": "sample_errors", "what": "1 of 9 failed", "count": 1},
        {"code": 4, "kind": "violation", "what": "1 above", "count": 1},
    ]
    with_executor(
        monkeypatch, StoredExecutor(stored_run(tmp_path, "certified", [1.0] * 9, problems=both, samples=9))
    )
    code, _, err = ask(capsys, "eval")
    assert code == 4
    assert err.index("1 above") < err.index("1 of 9 failed")


def test_an_interrupted_eval_says_how_to_go_on(capsys, monkeypatch):
    with_executor(monkeypatch, StoredExecutor(stop=True))
    code, out, err = ask(capsys, "eval", "--fresh", "-O", "eps=0.02", "--json")
    assert code == 130
    assert "rcq eval -O eps=0.02 --json --resume" in err
    document = json.loads(out)
    assert (document["status"], document["exit_code"]) == ("interrupted", 130)


def test_flags_reach_the_spec(tmp_path, capsys, monkeypatch):
    with_executor(monkeypatch, executor := StoredExecutor(stored_run(tmp_path, "naive", [1.0] * 9)))
    argv = ["--mode", "naive", "--ctx", "1k,8k", "--seed", "7", "--dtype", "float16", "--device", "cpu"]
    argv += [
        "--backend",
        "ref",
        "--audit",
        "0.25",
        "--shard",
        "1/4",
        "--keep-prompts",
        "--resume",
        "-T",
        "gen=8",
    ]
    assert ask(capsys, "eval", *argv)[0] in (0, 6)
    batches, _, resume = executor.asked
    assert resume is True
    assert [batch[0].ctx for batch in batches] == [1024, 8192]
    spec = batches[0][0]
    assert (spec.mode, spec.seed, spec.dtype, spec.device, spec.backend) == (
        "naive",
        7,
        "float16",
        "cpu",
        "reference",
    )
    assert (spec.audit, spec.shard, spec.keep_prompts, spec.task_options["gen"]) == (0.25, "1/4", True, 8)


def test_a_bare_audit_means_every_step(tmp_path, capsys, monkeypatch):
    with_executor(monkeypatch, executor := StoredExecutor(stored_run(tmp_path, "certified", [1.0] * 9)))
    ask(capsys, "eval", "--audit", "--quiet")
    assert executor.asked[0][0][0].audit == 1.0


def test_a_run_is_scored_again_without_a_model(tmp_path, capsys):
    folder = stored_run(tmp_path / "runs", "naive", [1.0, 0.0, 1.0], samples=3)
    code, out, _ = ask(capsys, "eval", "--rescore", str(folder), "--out", str(tmp_path / "again"), "--json")
    document = json.loads(out)
    assert document["exit_code"] == code
    assert Path(document["run"]).parent == tmp_path / "again"
    # the stored texts are "1.0 " and "0.0 ", the reference is "7"
    assert document["cells"][0]["score"] == 0.0


@pytest.mark.parametrize(
    "argv",
    [
        ["stray"],
        ["--merge"],
        ["--merge", "{run}", "--task", "niah"],
        ["--rescore", "{run}", "--mode", "naive"],
    ],
)
def test_merge_and_rescore_refuse_what_they_cannot_use(argv, tmp_path, capsys):
    folder = stored_run(tmp_path, "naive", [1.0], samples=1)
    code, out, err = ask(capsys, "eval", *(word.format(run=folder) for word in argv))
    assert (code, out, len(err.splitlines())) == (2, "", 1)


@pytest.mark.parametrize("name", ["begun_hash", "mode_hash"])
def test_merge_says_which_file_of_a_run_lacks_a_hash(name, tmp_path, capsys):
    folders = [stored_run(tmp_path / str(i), "naive", [1.0], samples=1) for i in range(2)]
    path = folders[1] / "contract.json"
    stored = json.loads(path.read_text("utf-8"))
    del stored[name]
    path.write_text(json.dumps(stored), "utf-8")
    code, out, err = ask(capsys, "eval", "--merge", *map(str, folders), "--out", str(tmp_path / "out"))
    assert (code, out) == (6, "")
    assert f"{path} cannot be read" in err
    assert "RCQ-RUN-03" in err


# -- lists --------------------------------------------------------------------------------------------------


def test_modes_and_tasks_list_one_line_each(capsys):
    for command, member in (("modes", "certified"), ("tasks", "niah")):
        code, out, _ = ask(capsys, command)
        assert code == 0
        assert sum(line.startswith(f"{member} ") for line in out.splitlines()) == 1


def test_the_options_of_a_mode_are_shown_with_their_defaults(capsys):
    _, out, _ = ask(capsys, "modes", "certified", "--json")
    options = {option["option"]: option for option in json.loads(out)["options"]}
    from rcq_cli.modes.certified import MODE

    assert options["eps"]["default"] == MODE.Options().eps
    assert options["eps"]["help"]


def test_models_say_what_is_here_without_network(capsys):
    _, out, _ = ask(capsys, "models", "--json")
    models = {model["name"]: model for model in json.loads(out)["models"]}
    assert models["needle"]["here"] is True
    assert ask(capsys, "models", "pull")[0] == 2
    assert ask(capsys, "models", "fetch")[0] == 2


def test_doctor_reports_every_probe_with_a_reason_and_never_a_false_zero(capsys):
    code, out, _ = ask(capsys, "doctor", "--json")
    probes = {probe["name"]: probe for probe in json.loads(out)["probes"]}
    assert code == 0
    assert probes["python"]["value"].startswith(".".join(map(str, sys.version_info[:3])))
    assert {"torch", "nvml", "cuda", "memory", "cache folder", "backend reference", "model needle"} <= set(
        probes
    )
    for probe in probes.values():
        assert probe["value"] is not None or probe["status"] == "ok" or probe["reason"]


def test_doctor_names_a_missing_driver_library(monkeypatch):
    import pynvml

    from rcq_cli.readings import Status
    from rcq_cli.telemetry import nvml

    def fails(code: int):
        def init() -> None:
            raise pynvml.NVMLError(code)

        return init

    for code, status in ((12, Status.NO_DRIVER), (9, Status.NO_DRIVER), (18, Status.DRIVER_MISMATCH)):
        monkeypatch.setattr(pynvml, "nvmlInit", fails(code))
        found = nvml.probe()
        assert found.status is status
        assert found.fix
    monkeypatch.setattr(pynvml, "nvmlInit", fails(4))
    assert nvml.probe().status is Status.NO_PERMISSION
    monkeypatch.setitem(sys.modules, "pynvml", None)
    assert nvml.probe().status is Status.NO_LIBRARY


# -- dry run ------------------------------------------------------------------------------------------------


def test_figures_are_extended_on_the_line_through_two_trials():
    trials = [Trial(1024, 300, 10, 500, 1.0), Trial(2048, 500, 10, 1000, 1.5)]
    assert extended(trials, "device", 4096) == 900
    assert extended(trials, "host", 65536) == 10
    assert extended(trials, "seconds", 4096) == 2.5
    assert extended(trials[:1], "device", 4096) == 300


def test_a_line_that_falls_is_noise_and_never_leads_below_the_last_trial():
    trials = [Trial(1024, 300, 10, 500, 1.0), Trial(2048, 500, 10, 1000, 0.75)]
    assert extended(trials, "seconds", 65536) == 0.75


def test_a_dry_run_leaves_out_what_only_the_first_answer_takes(tmp_path, capsys, monkeypatch):
    decode, seconds = Engine.decode, iter((60.0, 1.0, 1.5))

    def timed(*args, **more):
        done = decode(*args, **more)
        return replace(done, step_ns=(int(next(seconds) * 1e9),), selection_ns=0, prefill_ns=0)

    monkeypatch.setattr(Engine, "decode", timed)
    argv = ("--ctx", "4k", "--samples", "3", "--mode", "dense", "--dry-run", "--json")
    code, out, _ = ask(capsys, "eval", *argv, "--out", str(tmp_path))
    (entry,) = json.loads(out)["runs"]
    # 1 s at 1024 tokens and 1.5 s at 2048 are 2.5 s at 4096
    assert (code, entry["seconds"], entry["status"]) == (0, 3 * 2.5, "estimated")


@pytest.mark.parametrize("words", [("eval",), ("compare", "dense", "certified"), ("trace",)], ids="-".join)
def test_a_dry_run_refuses_what_the_run_would_refuse(words, tmp_path, capsys):
    taken = tmp_path / "runs"
    taken.write_text("a file")
    code, _, err = ask(capsys, *words, "--dry-run", "--ctx", "1k", "--out", str(taken))
    assert code == 2
    assert "is a file" in err
    code, _, err = ask(capsys, *words, "--dry-run", "--ctx", "1k", "--workers", "2")
    assert code == 2
    assert "--workers has no meaning with executor local" in err


def test_a_dry_run_writes_nothing_and_shows_the_matrix(tmp_path, capsys):
    out_folder = tmp_path / "runs"
    argv = [
        "eval",
        "--ctx",
        "1k",
        "--samples",
        "3",
        "--mode",
        "dense",
        "--dry-run",
        "--out",
        str(out_folder),
        "--json",
    ]
    code, out, _ = ask(capsys, *argv)
    (entry,) = json.loads(out)["runs"]
    assert code == 0
    assert not out_folder.exists()
    assert (entry["task"], entry["ctx"], entry["mode"], entry["samples"]) == ("niah", 1024, "dense", 3)
    assert entry["spec"]["origins"]["samples"] == "flag"
    # float32 originals of one managed layer: keys and values of 128 channels, at least 900 tokens
    assert entry["bytes"]["device"] >= 2 * 900 * 2 * 128 * 2
    assert entry["seconds"] > 0
