import json
import subprocess
import sys

import pytest

from rcq_cli import finish, run, store
from rcq_cli.errors import BrokenRun, NotComparable, SpecError, UnsupportedHere
from rcq_cli.finish import merge, rescore
from rcq_cli.records import prompt_sha256
from rcq_cli.store import RunReader
from tests.unit import stub_bench
from tests.unit.stub_bench import NAN, OUT_OF_MEMORY, Engine, Task, batch, execute, loaded


@pytest.fixture(autouse=True)
def task(monkeypatch):
    made = Task()
    entries = stub_bench.Stubs("", "", "task", {"stub": made})
    monkeypatch.setattr(run, "TASKS", entries)
    monkeypatch.setattr(finish, "TASKS", entries)
    monkeypatch.setattr(run, "MODES", stub_bench.Stubs("", "", "mode", stub_bench.MODES))
    return made


def readers(out, engine=None, *batches, **more):
    return [RunReader(folder) for folder in execute(out, engine or Engine(), *batches, **more)]


def summary_of(out, behave, **changes):
    """Summary of the certified arm when the engine behaves like that."""
    return readers(out, Engine(behave), batch(**changes))[1].summary


def kinds(summary):
    return {problem["kind"]: problem["code"] for problem in summary["problems"]}


# -- what a run holds ----------------------------------------------------------------------------------------


def test_two_modes_share_each_prompt_and_one_prefill(tmp_path):
    engine = Engine()
    dense, certified = readers(tmp_path, engine)
    assert len(engine.prefills) == 5 + 2
    assert len(engine.decoded) == 2 * 5 + 2 + 1
    assert [r["prompt_ids_sha256"] for r in dense.examples()] == [
        r["prompt_ids_sha256"] for r in certified.examples()
    ]


def test_a_cell_says_what_was_measured(tmp_path):
    reader = readers(tmp_path)[1]
    (cell,) = reader.cells()
    assert {k: cell[k] for k in ("task", "ctx", "mode", "model", "n", "score", "metric", "status")} == {
        "task": "stub",
        "ctx": 32,
        "mode": "certified",
        "model": "stub",
        "n": 5,
        "score": 1.0,
        "metric": "accuracy",
        "status": "complete",
    }
    # Wilson at 5 of 5: 5 / (5 + z^2) below
    assert cell["score_ci"] == pytest.approx([5 / (5 + 1.959963985**2), 1.0])
    assert cell["metrics"] == {"length": pytest.approx(len("<stub/32/0>"))}
    assert (cell["dtype"], cell["fill_ratio_min"], cell["prompt_tokens_median"]) == ("float16", 1.0, 28)
    assert (cell["tokens_per_s"], cell["step_ms_p50"]) == (500.0, 1.0)
    assert cell["run"] == str(reader.folder)


def test_bytes_are_the_largest_over_the_samples(tmp_path):
    found = readers(tmp_path)[0].cells()[0]["bytes"]
    assert found == {
        "device": 104,
        "host": 7,
        "metadata": 3,
        "scratch": 5,
        "dense_equivalent": 204,
        "device_ratio": 104 / 204,
    }


def test_certificates_stand_where_the_mode_certifies(tmp_path):
    dense, certified = readers(tmp_path)
    assert dense.cells()[0]["certificates"] is None
    assert dense.cells()[0]["certificates_status"] == "not_applicable"
    assert dense.steps() is None
    found = certified.cells()[0]["certificates"]
    assert (found["head_steps"], found["certified"], found["audited"]) == (5 * 2 * 1 * 2, 20, 20)
    assert found["rungs"] == {"0": 0, "1": 20, "2": 0, "3": 0, "4": 0}
    assert (found["promoted_key_share"], found["host_to_device_bytes_per_step"]) == (0.25, 10)
    assert set(found) == {
        *("head_steps", "certified", "exact", "violations", "audited", "rel_bound_p50", "rel_bound_p95"),
        *("rel_error_max", "rungs", "promoted_key_share", "promoted_value_share"),
        "host_to_device_bytes_per_step",
    }
    assert certified.steps().num_rows == 20


def test_a_run_holds_the_documented_files(tmp_path):
    certified = readers(tmp_path)[1]
    assert sorted(path.name for path in certified.folder.iterdir()) == [
        *("contract.json", "controls.jsonl", "environment.json", "examples.jsonl", "spec.json"),
        *("steps.parquet", "summary.json", "telemetry.jsonl"),
    ]
    for path in certified.folder.glob("*.json"):
        assert json.loads(path.read_text())["schema"] == 1
    for path in certified.folder.glob("*.jsonl"):
        assert all(json.loads(line)["schema"] == 1 for line in path.read_text().splitlines())


def test_two_runs_of_one_spec_write_the_same_rows(tmp_path):
    first, second = (execute(tmp_path / name, Engine())[1] for name in "ab")
    for name in ("examples.jsonl", "controls.jsonl", "contract.json"):
        assert (first / name).read_bytes() == (second / name).read_bytes()


def test_parts_are_cells_of_one_run(tmp_path, task):
    task.parts = ("b", "a")
    (folder,) = execute(
        tmp_path, Engine(lambda _, s: "right" if "/b/" in s.sample_id else "wrong"), batch("dense")
    )
    cells = RunReader(folder).cells()
    assert [(cell["task"], cell["n"], cell["score"]) for cell in cells] == [
        ("stub/b", 5, 1.0),
        ("stub/a", 5, 0.0),
    ]


def test_one_part_alone_is_asked_for_by_name(tmp_path, task):
    task.parts = ("b", "a")
    (folder,) = execute(tmp_path, Engine(), batch("dense", task="stub/a"))
    assert [cell["task"] for cell in RunReader(folder).cells()] == ["stub/a"]
    assert {part for part, _ in task.drawn} == {"a"}


def test_decoys_left_open_follow_the_model(tmp_path):
    found = [
        readers(tmp_path, model=loaded(constructed=built))[0].contract["task.options"]["decoys"]
        for built in (True, False)
    ]
    assert found == [16, 0]


def test_the_contract_knows_the_prompts_once_they_are_drawn(tmp_path):
    fields = readers(tmp_path)[0].contract
    assert fields["tokenizer.bos_count"] == 1
    assert (fields["task.prompt_tokens_min"], fields["task.fill_ratio_min"]) == (28, 1.0)
    assert (fields["task.corpus_kind"], fields["decoding.max_new_tokens"]) == (["procedural"], [4])
    assert fields["pipeline.backend"] == "stub"


def test_prompts_are_kept_only_when_asked(tmp_path):
    kept, not_kept = readers(tmp_path, None, batch("dense", keep_prompts=True), batch("dense"))
    assert kept.examples()[0]["prompt"].startswith("1 ")
    assert not {"prompt", "prompt_ids"} & set(not_kept.examples()[0])


def test_a_kept_prompt_is_the_one_that_was_asked(tmp_path):
    (kept,) = readers(tmp_path, None, batch("dense", keep_prompts=True))
    for row in (*kept.examples(), *kept.controls()):
        assert prompt_sha256(row["prompt_ids"]) == row["prompt_ids_sha256"]
        assert len(row["prompt_ids"]) == row["prompt_tokens"]


def test_controls_are_never_audited_and_may_be_off(tmp_path):
    engine = Engine()
    reader = readers(tmp_path, engine, batch("certified", audit=0.5))[0]
    assert set(engine.audits) == {(None, 0.5), ("needle-only", 0.0), ("no-needle", 0.0)}
    assert reader.summary["controls"]["needle-only"] == {"n": 1, "score": 1.0, "hits": 1}
    off = readers(tmp_path, None, batch("certified", controls=False))[0]
    assert (off.controls(), off.summary["controls"]) == ([], {})


def test_the_control_without_a_needle_belongs_to_the_reference(tmp_path):
    dense, certified = readers(tmp_path)
    assert [r["control"] for r in dense.controls()] == ["needle-only", "no-needle"]
    assert [r["control"] for r in certified.controls()] == ["needle-only"]


def test_shards_answer_every_sample_once(tmp_path):
    shards = readers(tmp_path, None, batch("dense", shard="1/2"), batch("dense", shard="2/2"))
    indices = [[row["index"] for row in reader.examples()] for reader in shards]
    assert indices == [[0, 2, 4], [1, 3]]


# -- what goes wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (NAN, "nan"),
        (OUT_OF_MEMORY, "oom"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 9 bytes"), "oom"),
        (BrokenRun("corrupted"), "error"),
        (AttributeError("oops"), "error"),
    ],
)
def test_a_sample_that_fails_is_a_row_and_the_run_goes_on(tmp_path, error, status):
    found = readers(tmp_path, Engine(lambda name, s: error if s.index == 1 and name == "dense" else "right"))
    rows = found[0].examples()
    assert [row["status"] for row in rows] == ["ok", status, "ok", "ok", "ok"]
    assert str(error) in rows[1]["error"]
    (cell,) = found[0].cells()
    assert (cell["n"], cell["errors"], cell["score"], cell["status"]) == (4, 1, 1.0, "error")
    assert kinds(found[0].summary) == {"sample_errors": 6}
    assert found[1].status == "complete"


def test_failed_samples_are_tried_again_by_resume(tmp_path):
    first = execute(tmp_path, Engine(lambda _, s: OUT_OF_MEMORY if s.index == 1 else "right"))
    engine = Engine()
    assert execute(tmp_path, engine, resume=True) == first
    assert engine.decoded == [("dense", "stub/32/1"), ("certified", "stub/32/1")]
    assert [RunReader(folder).status for folder in first] == ["complete", "complete"]
    whole = execute(tmp_path / "whole", Engine())
    assert deterministic(first[1]) == deterministic(whole[1])


def test_a_score_that_is_not_finite_is_an_error(tmp_path, task):
    task.score = lambda _sample, _completion: {"accuracy": float("nan")}
    summary = summary_of(tmp_path, lambda _mode, _s: "right")
    assert kinds(summary) == {"sample_errors": 6, "control_errors": 6}
    assert (summary["cells"][0]["score"], summary["cells"][0]["score_status"]) == (None, "no_samples")


def test_an_error_that_stops_every_sample_stops_the_run(tmp_path):
    missing = UnsupportedHere("no such backend")
    with pytest.raises(UnsupportedHere):
        execute(tmp_path, Engine(lambda _mode, _s: missing))
    assert list(tmp_path.iterdir()) == []


def test_a_context_above_the_models_is_refused_before_any_work(tmp_path):
    engine = Engine()
    with pytest.raises(SpecError, match="allowed: up to 1024"):
        execute(tmp_path, engine, batch(), batch(ctx=2048))
    assert (engine.decoded, list(tmp_path.iterdir())) == ([], [])


def test_a_prompt_below_the_fill_floor_is_an_error_and_costs_nothing(tmp_path, task):
    task.floor = 1.1
    engine = Engine()
    reader = readers(tmp_path, engine, batch("dense", controls=False))[0]
    assert engine.prefills == []
    assert {row["status"] for row in reader.examples()} == {"error"}
    assert "below 1.100" in reader.summary["problems"][0]["what"]


@pytest.mark.parametrize(
    ("behave", "expected"),
    [
        ("right", {}),
        ("short", {}),
        ("inactive", {"inactive": 6}),
        ("violated", {"violation": 4}),
    ],
)
def test_problems_carry_the_exit_code_they_deserve(tmp_path, behave, expected):
    assert kinds(summary_of(tmp_path, lambda _mode, _s: behave)) == expected


def test_an_answer_without_a_needle_is_a_leak(tmp_path, task):
    task.leak = True
    dense, certified = readers(tmp_path)
    assert kinds(dense.summary) == {"control_no_needle": 6}
    assert kinds(certified.summary) == {}


def test_needle_only_makes_a_reference_unfit_and_a_candidate_only_reported(tmp_path):
    dense, certified = readers(tmp_path, Engine(lambda _, s: "wrong" if s.control else "right"))
    assert kinds(dense.summary) == {"control_needle_only": 6}
    assert kinds(certified.summary) == {}
    assert certified.summary["controls"]["needle-only"]["score"] == 0.0


# -- interrupted, killed, resumed ----------------------------------------------------------------------------


def deterministic(folder):
    """The summary without what a clock made."""
    summary = json.loads((folder / "summary.json").read_text())
    for cell in summary["cells"]:
        del cell["tokens_per_s"], cell["step_ms_p50"]
    return summary


def test_a_stop_keeps_what_is_done_and_marks_the_run(tmp_path):
    stop = KeyboardInterrupt()
    engine = Engine(lambda _, s: stop if s.index == 2 else "right")
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, engine)
    found = [RunReader(folder) for folder in sorted(tmp_path.iterdir())]
    assert {reader.status for reader in found} == {"interrupted"}
    assert [len(reader.examples()) for reader in found] == [2, 2]
    (cell,) = found[0].cells()
    assert (cell["n"], cell["status"]) == (2, "interrupted")


@pytest.mark.parametrize("rows", [0, 1, 4, 11, 21])
def test_a_killed_run_resumes_to_the_same_result(tmp_path, task, rows):
    task.parts = ("", "b")
    command = [sys.executable, "-m", "tests.unit.stub_bench", str(tmp_path / "killed"), str(rows)]
    assert subprocess.run(command, check=False, timeout=60).returncode == 9
    engine = Engine()
    resumed = execute(tmp_path / "killed", engine, resume=True)
    whole = execute(tmp_path / "whole", Engine())
    assert len(engine.decoded) == 2 * (2 * 5 + 2 + 1) - rows
    assert len(list((tmp_path / "killed").iterdir())) == 2
    for left, right in zip(resumed, whole, strict=True):
        assert deterministic(left) == deterministic(right)
        assert (left / "contract.json").read_bytes() == (right / "contract.json").read_bytes()
        rows_of = [RunReader(folder).examples() for folder in (left, right)]
        assert rows_of[0] == rows_of[1]
    tables = [RunReader(folder[1]).steps() for folder in (resumed, whole)]
    assert tables[0].equals(tables[1])


def edited(folder, **changes):
    """Change fields of the first row of an unfinished run."""
    first, *rest = (folder / "examples.jsonl").read_text().splitlines(keepends=True)
    (folder / "examples.jsonl").write_text(json.dumps(json.loads(first) | changes) + "\n" + "".join(rest))


def unfinished(tmp_path):
    stop = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, Engine(lambda _, s: stop if s.index == 2 else "right"), batch("certified"))
    (folder,) = tmp_path.iterdir()
    return folder


@pytest.mark.parametrize("score", [7, -1, float("nan"), float("inf")])
@pytest.mark.parametrize("main", [{}, {"exact": 1.0}])
def test_a_score_that_cannot_be_is_not_resumed_from(tmp_path, task, score, main):
    """An accuracy is a share also where another metric is the main one."""
    task.score_key = next(iter(main), "accuracy")
    task.score = lambda *_: main | {"accuracy": 1.0}
    edited(unfinished(tmp_path), scores=main | {"accuracy": score})
    with pytest.raises(BrokenRun, match="scores") as caught:
        execute(tmp_path, Engine(), batch("certified"), resume=True)
    assert caught.value.id == "RCQ-RUN-03"


@pytest.mark.parametrize(
    ("key", "scores"),
    [
        ("accuracy", {}),
        ("accuracy", {"accuracy": None}),
        ("accuracy", {"accuracy": 7}),
        ("critical_recall", {"critical_recall": -1}),
        ("perplexity", {"perplexity": 0}),
        ("perplexity", {"perplexity": -3}),
    ],
)
def test_a_score_that_the_metric_cannot_take_is_not_reported(tmp_path, key, scores):
    folder = unfinished(tmp_path)
    edited(folder, scores=scores)
    contract = json.loads((folder / "contract.json").read_text())
    contract["facts"]["score_key"] = key
    (folder / "contract.json").write_text(json.dumps(contract))
    with pytest.raises(BrokenRun, match=key) as caught:
        RunReader(folder).cells()
    assert caught.value.id == "RCQ-RUN-03"


@pytest.mark.parametrize("scores", [{}, {"accuracy": None}])
def test_a_row_without_its_score_is_not_resumed_from(tmp_path, scores):
    edited(unfinished(tmp_path), scores=scores)
    with pytest.raises(BrokenRun, match="accuracy") as caught:
        execute(tmp_path, Engine(), batch("certified"), resume=True)
    assert caught.value.id == "RCQ-RUN-03"


@pytest.mark.parametrize(
    "change", [{"sample_id": "stub/32/99"}, {"index": 10**30}, {"prompt_ids_sha256": "0"}]
)
def test_a_row_of_another_sample_is_answered_again(tmp_path, change):
    edited(unfinished(tmp_path), **change)
    engine = Engine()
    (folder,) = execute(tmp_path, engine, batch("certified"), resume=True)
    assert engine.decoded[0][1] == "stub/32/0"
    assert [row["sample_id"] for row in RunReader(folder).examples()] == [f"stub/32/{i}" for i in range(5)]


def test_a_run_without_its_environment_is_not_scored_again(tmp_path):
    (folder,) = execute(tmp_path / "runs", Engine(), batch("certified"))
    (folder / "environment.json").unlink()
    with pytest.raises(BrokenRun, match=r"environment\.json") as caught:
        rescore(folder, tmp_path / "again")
    assert caught.value.id == "RCQ-RUN-23"
    assert not (tmp_path / "again").exists()


def test_a_row_whose_certificates_are_lost_is_answered_again(tmp_path):
    stop = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, Engine(lambda _, s: stop if s.index == 2 else "right"), batch("certified"))
    (folder,) = tmp_path.iterdir()
    data = (folder / "steps.jsonl.gz").read_bytes()
    (folder / "steps.jsonl.gz").write_bytes(data[:-3])
    engine = Engine()
    execute(tmp_path, engine, batch("certified"), resume=True)
    assert [name for _, name in engine.decoded][:2] == ["stub/32/1", "stub/32/2"]


@pytest.mark.parametrize("out", ["/proc/rcq", "file", "file/below"])
def test_a_place_that_takes_no_run_is_refused_before_a_model_is_loaded(out, tmp_path):
    (tmp_path / "file").write_text("")
    loaded_models = []
    executor = stub_bench.LocalExecutor(engine_for=loaded_models.append)
    with pytest.raises(SpecError, match=f"--out .*{out}'"):
        executor.run((batch(),), out=tmp_path / out, resume=False, progress=stub_bench.Silent())
    assert loaded_models == []


def test_a_finished_run_does_no_work_again(tmp_path):
    first = execute(tmp_path, Engine())
    before = [(path, path.read_bytes()) for folder in first for path in sorted(folder.iterdir())]

    def no_model(_spec):
        raise AssertionError("a model was loaded")

    again = stub_bench.LocalExecutor(engine_for=no_model).run(
        (batch(),), out=tmp_path, resume=True, progress=stub_bench.Silent()
    )
    assert again == first
    assert [(path, path.read_bytes()) for folder in again for path in sorted(folder.iterdir())] == before


def test_a_mode_added_later_reuses_the_finished_reference(tmp_path):
    (dense,) = execute(tmp_path, Engine(), batch("dense"))
    engine = Engine()
    both = execute(tmp_path, engine, resume=True)
    assert both[0] == dense
    assert {mode for mode, _ in engine.decoded} == {"certified"}
    assert [row["control"] for row in RunReader(both[1]).controls()] == ["needle-only"]


def test_another_mode_option_reuses_nothing(tmp_path):
    execute(tmp_path, Engine(), batch("certified"))
    engine = Engine()
    execute(tmp_path, engine, batch("certified", mode_options={"eps": 0.1}), resume=True)
    assert len(engine.decoded) == 5 + 2


def test_fresh_makes_a_new_run(tmp_path):
    first, second = (execute(tmp_path, Engine()) for _ in range(2))
    assert set(first).isdisjoint(second)


def test_a_folder_begun_with_another_model_is_not_continued(tmp_path):
    stop = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path, Engine(lambda _, s: stop if s.index == 2 else "right"), batch("dense"))
    other = loaded(fingerprint={"model.id": "other", "model.dtype": "float16"})
    with pytest.raises(NotComparable, match=r"these fields differ: model\.id"):
        execute(tmp_path, Engine(), batch("dense"), resume=True, model=other)
    assert len(RunReader(next(tmp_path.iterdir())).examples()) == 2


def test_what_an_engine_has_to_say_is_said_once_and_loading_is_named(tmp_path):
    heard = []

    class Listener(stub_bench.Silent):
        def note(self, text):
            heard.append(text)

        def doing(self, what):
            heard.append(what)

    engine = Engine(notes=("bfloat16 is emulated",))
    execute(tmp_path, engine, batch("dense"), batch("dense", seed=7), progress=Listener())
    assert heard[:3] == ["loading stub", "loading stub", "bfloat16 is emulated"]
    assert heard.count("bfloat16 is emulated") == 1


@pytest.mark.parametrize("late", [False, True])
def test_a_batch_without_prompts_ends_the_run_before_another_one_works(tmp_path, late):
    class Small(stub_bench.Task):
        def samples(self, request, tokenizer):
            def refuse():
                raise SpecError("ctx 16 is too small", id="RCQ-USE-20")
                yield

            if request.ctx == 32:
                return super().samples(request, tokenizer)
            return refuse() if late else next(refuse())

    run.TASKS.entries["stub"] = Small()
    engine = Engine()
    with pytest.raises(SpecError, match="ctx 16 is too small"):
        execute(tmp_path / "out", engine, batch("dense"), batch("dense", ctx=16))
    assert engine.decoded == []
    assert not (tmp_path / "out").exists()


def test_progress_hears_of_every_answer(tmp_path):
    heard = []

    class Listener(stub_bench.Silent):
        def update(self, cell, done, total, score=None, tokens_per_s=None, errors=0):
            heard.append((cell, done, total, score, tokens_per_s, errors))

    execute(
        tmp_path,
        Engine(lambda _, s: NAN if s.index == 1 else "right"),
        batch("dense"),
        progress=Listener(),
    )
    assert heard[0] == ("stub dense T=32", 1, 5, 1.0, 500.0, 0)
    assert heard[1] == ("stub dense T=32", 2, 5, 1.0, None, 1)
    assert [entry[0] for entry in heard[5:]] == ["stub controls dense T=32"] * 2


def test_a_full_disk_stops_the_run_and_says_so(tmp_path, monkeypatch):
    real = store.RunWriter.append_row

    def full(writer, row):
        if row["index"] == 3:
            raise BrokenRun("cannot write", why="No space left on device", id="RCQ-RUN-01")
        real(writer, row)

    monkeypatch.setattr(store.RunWriter, "append_row", full)
    with pytest.raises(BrokenRun, match="No space left"):
        execute(tmp_path, Engine(), batch("dense"))
    assert len(RunReader(next(tmp_path.iterdir())).examples()) == 3


# -- runs made of runs --------------------------------------------------------------------------------------


def test_merged_shards_are_the_whole_run(tmp_path):
    shards = execute(
        tmp_path, Engine(), *(batch("certified", audit=1.0, shard=f"{i}/3") for i in (1, 2, 3)), resume=False
    )
    whole = execute(tmp_path / "whole", Engine(), batch("certified", audit=1.0))[0]
    merged = merge(shards, tmp_path / "merged")
    assert deterministic(merged) == deterministic(whole)
    assert RunReader(merged).spec == RunReader(whole).spec
    assert RunReader(merged).examples() == RunReader(whole).examples()
    assert RunReader(merged).steps().equals(RunReader(whole).steps())


def test_runs_of_different_settings_do_not_merge(tmp_path):
    folders = execute(tmp_path, Engine(), batch("dense", shard="1/2"), batch("dense", shard="2/2", seed=1))
    with pytest.raises(NotComparable, match="not shards of one run"):
        merge(folders, tmp_path)
    with pytest.raises(SpecError, match="at least two"):
        merge(folders[:1], tmp_path)


def shards_of(out, count, *numbers):
    """Folders of the shards `numbers` of `count`."""
    return execute(out, Engine(), *(batch("dense", shard=f"{i}/{count}") for i in numbers))


@pytest.mark.parametrize(
    ("numbers", "raised", "message"),
    [
        ((1, 1), SpecError, "got 1/3 twice"),
        ((1, 2, 3, 2), SpecError, "got 2/3 twice"),
        ((3, 1), BrokenRun, "1 of 3 shards are missing; no run of 2/3 was given"),
    ],
)
def test_shards_merge_only_when_each_is_there_once(tmp_path, numbers, raised, message):
    folders = shards_of(tmp_path / "shards", 3, *sorted(set(numbers)))
    named = dict(zip(sorted(set(numbers)), folders, strict=True))
    with pytest.raises(raised, match=message):
        merge([named[number] for number in numbers], tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_run_divided_in_two_ways_does_not_merge(tmp_path):
    folders = [*shards_of(tmp_path, 2, 1), *shards_of(tmp_path, 4, 2)]
    with pytest.raises(NotComparable, match="they are 1/2, 2/4"):
        merge(folders, tmp_path / "merged")


def test_a_whole_run_is_no_shard(tmp_path):
    folders = execute(tmp_path, Engine(), batch("dense"), batch("dense"))
    with pytest.raises(SpecError, match="the whole run twice"):
        merge(folders, tmp_path / "merged")


def stopped_at(sample_id):
    """An engine that is stopped by the user at that sample."""
    return Engine(lambda _mode, sample: KeyboardInterrupt() if sample.sample_id == sample_id else "right")


@pytest.mark.parametrize("sample_id", ["stub/32/3", "stub/32/no-needle/0"])
def test_nothing_is_made_of_a_run_that_was_stopped(tmp_path, sample_id):
    with pytest.raises(KeyboardInterrupt):
        execute(tmp_path / "runs", stopped_at(sample_id), batch("dense", shard="2/2"))
    (stopped,) = (tmp_path / "runs").iterdir()
    (other,) = shards_of(tmp_path / "runs", 2, 1)
    for make in (lambda out: rescore(stopped, out), lambda out: merge([other, stopped], out)):
        with pytest.raises(BrokenRun, match=r"did not come to its end; it is interrupted.*--resume"):
            make(tmp_path / "made")
    assert not (tmp_path / "made").exists()
    finished = execute(tmp_path / "runs", Engine(), batch("dense", shard="2/2"), resume=True)
    assert RunReader(merge([other, *finished], tmp_path / "made")).status == "complete"


def test_a_shard_without_samples_and_one_with_a_failed_sample_can_be_merged(tmp_path):
    shards = [batch("dense", samples=2, shard=f"{i}/3") for i in (1, 2, 3)]
    folders = execute(tmp_path, Engine(lambda _, s: NAN if s.index == 1 else "right"), *shards)
    merged = RunReader(merge(folders, tmp_path / "merged"))
    assert (merged.status, merged.cells()[0]["n"], merged.cells()[0]["errors"]) == ("error", 1, 1)
    assert kinds(merged.summary) == {"sample_errors": 6}


def test_stored_answers_are_scored_by_the_task_of_today(tmp_path, task):
    (folder,) = execute(tmp_path, Engine(lambda _, s: NAN if s.index == 4 else "right"), batch("certified"))
    task.metric = "exact@2"
    task.score = lambda sample, _completion: {"accuracy": float(sample.index > 1)}
    again = RunReader(rescore(folder, tmp_path / "again"))
    (cell,) = again.cells()
    assert (cell["score"], cell["n"], cell["errors"], cell["metric_version"]) == (0.5, 4, 1, "exact@2")
    before = RunReader(folder)
    assert again.contract == before.contract | {"task.metric": "exact@2"}
    assert again.steps().equals(before.steps())
    assert before.cells()[0]["score"] == 1.0
