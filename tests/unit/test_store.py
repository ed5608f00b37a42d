import errno
import gzip
import json
import os
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pytest

from rcq_cli import steps, store
from rcq_cli.errors import BrokenRun, SpecError
from rcq_cli.files import read_lines
from rcq_cli.protocols import StepArrays
from rcq_cli.spec import RunSpec
from rcq_cli.store import (
    RunReader,
    RunWriter,
    check_out,
    discard_empty,
    find_complete,
    find_unfinished,
    new_folder,
)

NOW = datetime(2026, 1, 31, 12, 0, 5, tzinfo=UTC)


def spec(**changes):
    values = {"model": "needle", "task": "niah", "mode": "certified", "ctx": 4096, "samples": 3}
    return RunSpec(**values | changes)


def row(key, control=None, **more):
    base = {
        "schema": 1,
        "key": key,
        "sample_id": key,
        "part": "",
        "index": 0,
        "control": control,
        "status": "ok",
    }
    answer = {"text": "", "output_ids": [], "scores": {"accuracy": 1.0}, "engaged": {}}
    return base | answer | {"prompt_ids_sha256": "p", "meta": {}, "steps": False} | more


def arrays(seed=0, steps_count=2, layers=(0, 3), heads=4):
    rng = np.random.default_rng(seed)
    shape = (steps_count, len(layers), heads)

    def bound():
        return rng.random(shape).astype(np.float32)

    return StepArrays(
        key_bound=bound(),
        value_bound=bound(),
        dropped_bound=bound(),
        rounding_bound=bound(),
        total_bound=bound(),
        output_norm=bound() + 5,
        true_error=np.where(rng.random(shape) < 0.5, np.nan, 0.001).astype(np.float32),
        violated=np.zeros(shape, bool),
        exact=rng.random(shape) < 0.3,
        rung=rng.integers(0, 5, shape).astype(np.int8),
        promoted_key_blocks=rng.integers(0, 9, shape).astype(np.int32),
        promoted_value_blocks=rng.integers(0, 9, shape).astype(np.int32),
        blocks=rng.integers(9, 20, shape[:2]).astype(np.int32),
        paged_bytes=rng.integers(0, 10**9, shape[:2]),
        layers=layers,
    )


@pytest.fixture
def folder(tmp_path):
    return new_folder(tmp_path, spec(), NOW)


# -- folders -------------------------------------------------------------------------------------------------


def test_a_folder_is_named_by_time_task_mode_and_digest(tmp_path):
    made = spec(task="ruler/vt", mode="certified:eps=0.02")
    assert (
        new_folder(tmp_path, made, NOW).name
        == f"20260131T120005Z-ruler-vt-certified-eps=0.02-{made.digest()[:8]}"
    )


def test_two_runs_of_one_second_have_two_folders(tmp_path):
    first, second = (new_folder(tmp_path, spec(), NOW).name for _ in range(2))
    assert second > first


def test_what_was_asked_comes_back(folder):
    assert RunReader(folder).spec == spec()
    assert (RunReader(folder).status, RunReader(folder).summary) == ("started", None)


def test_a_folder_that_is_no_run_is_a_usage_error(tmp_path):
    with pytest.raises(SpecError, match="no run folder"):
        RunReader(tmp_path / "nothing")


def test_out_that_is_a_file_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SpecError, match="is a file"):
        new_folder(tmp_path / "file", spec())


@pytest.mark.parametrize("place", ["/proc/rcq", "/proc/rcq/below"])
def test_a_place_that_cannot_be_written_is_a_usage_error(place):
    with pytest.raises(SpecError, match=f"--out '{place}' cannot be written"):
        new_folder(Path(place), spec())


def test_a_full_disk_is_no_usage_error(tmp_path, monkeypatch):
    monkeypatch.setattr(store, "unwritable", lambda _: OSError(errno.ENOSPC, "No space left on device"))
    with pytest.raises(BrokenRun, match="No space left"):
        check_out(tmp_path)


def test_checking_a_place_leaves_nothing_there(tmp_path):
    check_out(tmp_path / "new" / "runs")
    check_out(tmp_path)
    assert list(tmp_path.iterdir()) == []


def ended(folder, status):
    with RunWriter(folder) as writer:
        writer.finish({"status": status, "cells": []}, [])


def test_the_newest_run_of_the_same_spec_is_found(tmp_path):
    old, new = (new_folder(tmp_path, spec(), NOW) for _ in range(2))
    new_folder(tmp_path, spec(seed=1), NOW)
    assert find_unfinished(tmp_path, spec()) == new
    assert find_complete(tmp_path, spec()) is None
    ended(old, "complete")
    assert find_complete(tmp_path, spec()) == old
    assert find_unfinished(tmp_path, spec()) == new
    assert find_unfinished(tmp_path / "nowhere", spec()) is None


def test_a_run_with_failed_samples_is_unfinished(tmp_path, folder):
    ended(folder, "error")
    assert find_unfinished(tmp_path, spec()) == folder


def test_only_a_folder_without_rows_is_discarded(folder, tmp_path):
    other = new_folder(tmp_path, spec(), NOW)
    with RunWriter(folder) as writer:
        writer.append_row(row("a"))
    with RunWriter(other):
        pass
    discard_empty(folder)
    discard_empty(other)
    assert (folder.exists(), other.exists()) == (True, False)


# -- rows ----------------------------------------------------------------------------------------------------


def test_rows_stand_one_per_line_as_canonical_json(folder):
    with RunWriter(folder) as writer:
        writer.append_row(row("b", text="naïve", index=1))
        writer.append_row(row("a", index=0))
        writer.append_row(row("c", control="no-needle"))
    lines = (folder / "examples.jsonl").read_bytes().split(b"\n")
    expected = json.dumps(
        row("b", text="naïve", index=1), sort_keys=True, separators=(",", ":"), ensure_ascii=False
    )
    assert lines[0].decode() == expected
    assert (len(lines), lines[-1]) == (3, b"")
    assert [r["key"] for r in RunReader(folder).examples()] == ["a", "b"]
    assert [r["key"] for r in RunReader(folder).controls()] == ["c"]


def test_a_row_that_is_no_json_is_refused_and_leaves_nothing(folder):
    with RunWriter(folder) as writer:
        with pytest.raises(ValueError, match="Out of range"):
            writer.append_row(row("a", score=float("nan")))
        writer.append_row(row("b"))
    assert [r["key"] for r in RunReader(folder).examples()] == ["b"]


def test_any_cut_of_the_file_keeps_the_rows_before_it(folder):
    with RunWriter(folder) as writer:
        for key in "abc":
            writer.append_row(row(key, text="é" * 5))
    path = folder / "examples.jsonl"
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == 10]
    for cut in range(len(whole) + 1):
        path.write_bytes(whole[:cut])
        rows, good, torn = read_lines(path)
        kept = sum(end <= cut for end in ends)
        assert (len(rows), good, torn) == (kept, ends[kept - 1] if kept else 0, cut not in (0, *ends))


def test_a_torn_last_line_is_cut_off_before_more_is_written(folder):
    with RunWriter(folder) as writer:
        writer.append_row(row("a"))
    with (folder / "examples.jsonl").open("ab") as file:
        file.write(b'{"key": "to')
    with RunWriter(folder) as writer:
        assert writer.notes == ["examples.jsonl: a torn last line was dropped"]
        writer.append_row(row("b"))
    assert [r["key"] for r in RunReader(folder).examples()] == ["a", "b"]


def test_a_reader_leaves_out_a_torn_line_and_says_so(folder):
    (folder / "examples.jsonl").write_bytes(b'{"key": "to')
    reader = RunReader(folder)
    assert reader.examples() == []
    assert reader.notes == ["examples.jsonl: a torn last line was left out"]


def test_a_broken_line_in_the_middle_is_an_error(folder):
    (folder / "examples.jsonl").write_bytes(b'{"key": \n{"key": "a"}\n')
    with pytest.raises(BrokenRun, match="line 1 is broken"):
        RunReader(folder).examples()


def test_of_two_rows_of_one_sample_the_last_wins(folder):
    with RunWriter(folder) as writer:
        writer.append_row(row("a", status="oom"))
        writer.append_row(row("a", status="ok"))
    assert [r["status"] for r in RunReader(folder).examples()] == ["ok"]


def test_a_second_process_is_turned_away(folder):
    with RunWriter(folder), pytest.raises(BrokenRun, match="another process"):
        RunWriter(folder)
    with RunWriter(folder) as writer:
        assert writer.notes == []


def test_a_full_disk_is_told_and_loses_nothing(folder, monkeypatch):
    real = os.write
    with RunWriter(folder) as writer:
        writer.append_row(row("a"))

        def half(fd, data):
            if len(data) > 20:
                return real(fd, data[:20])
            raise OSError(errno.ENOSPC, "No space left on device")

        monkeypatch.setattr(os, "write", half)
        with pytest.raises(BrokenRun, match="No space left on device"):
            writer.append_row(row("b"))
        monkeypatch.setattr(os, "write", real)
        writer.append_row(row("c"))
    assert [r["key"] for r in RunReader(folder).examples()] == ["a", "c"]


def test_a_file_of_another_schema_is_refused(folder):
    (folder / "contract.json").write_text('{"schema": 2}')
    with pytest.raises(BrokenRun, match="schema 2"):
        _ = RunReader(folder).contract


@pytest.mark.parametrize("how", ["gone", "empty", "half"])
def test_the_digests_of_a_finished_run_cannot_be_taken_away(folder, how):
    ended(folder, "complete")
    path = folder / "telemetry.jsonl"
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 2] if how == "half" else b"")
    if how == "gone":
        path.unlink()
    with pytest.raises(
        BrokenRun, match=r"telemetry\.jsonl of .* changed after the run was finished"
    ) as caught:
        _ = RunReader(folder).status
    assert ("it is gone" in caught.value.why) is (how == "gone")
    assert "restore the file" in caught.value.fix


@pytest.mark.parametrize("name", ["spec.json", "examples.jsonl", "controls.jsonl"])
def test_a_file_that_is_gone_from_a_finished_run_is_named(folder, name):
    ended(folder, "complete")
    reader = RunReader(folder)
    (folder / name).unlink()
    with pytest.raises(BrokenRun, match=rf"{name} of .*it is gone.*restore the file"):
        _ = (reader.spec, reader.examples(), reader.controls())


def test_the_last_mark_is_the_status(folder):
    with RunWriter(folder) as writer:
        writer.append_telemetry({"kind": "status", "status": "started"})
        writer.append_telemetry({"kind": "status", "status": "interrupted"})
    assert RunReader(folder).status == "interrupted"


def test_a_complete_run_stays_as_it_is_when_opened(folder):
    with RunWriter(folder) as writer:
        writer.finish({"status": "complete", "cells": []}, [])
    before = (folder / "summary.json").read_bytes()
    with RunWriter(folder) as writer:
        assert writer.complete
    assert (folder / "summary.json").read_bytes() == before


def test_opening_a_failed_run_takes_its_summary_back(folder):
    with RunWriter(folder) as writer:
        writer.finish({"status": "error", "cells": []}, [])
    with RunWriter(folder) as writer:
        assert not writer.complete
    assert RunReader(folder).summary is None


# -- certificates --------------------------------------------------------------------------------------------


def logged(folder, seeds, status):
    with RunWriter(folder) as writer:
        for seed in seeds:
            writer.append_row(row(f"k{seed}", index=seed, steps=True))
            writer.append_steps(f"k{seed}", f"k{seed}", arrays(seed))
        writer.finish({"status": status, "cells": []}, [f"k{seed}" for seed in seeds])


def test_arrays_come_back_bit_for_bit():
    made = arrays()
    record = json.loads(gzip.decompress(steps.encode("s", "k", made, 1)))
    back = steps.decode(record)
    for name in steps.UNITS:
        np.testing.assert_array_equal(back[name], getattr(made, name))
        assert back[name].dtype == getattr(made, name).dtype
    assert record["arrays"]["key_bound"]["dtype"] == "<f4"


def test_a_torn_last_member_is_left_out_at_any_cut(folder):
    members = [steps.encode(f"s{i}", f"k{i}", arrays(i), 1) for i in range(2)]
    path = folder / "steps.jsonl.gz"
    for cut in range(0, len(members[1]), 97):
        path.write_bytes(members[0] + members[1][:cut])
        log = steps.StepLog(path)
        assert (list(log.members), log.good_bytes) == (["k0"], len(members[0]))


def test_certificates_go_on_after_a_torn_member(folder):
    member = steps.encode("k0", "k0", arrays(0), 1)
    (folder / "steps.jsonl.gz").write_bytes(member + member[:50])
    with RunWriter(folder) as writer:
        writer.append_steps("k1", "k1", arrays(1))
    log = steps.StepLog(folder / "steps.jsonl.gz")
    assert [record["sample_id"] for record in log.read(["k1", "k0", "k9"])] == ["k1", "k0"]


def test_a_complete_run_holds_its_certificates_as_parquet(folder, tmp_path):
    other = new_folder(tmp_path, spec(), NOW)
    logged(folder, (0, 1), "complete")
    logged(other, (0, 1), "error")
    assert sorted(p.name for p in folder.iterdir() if "steps" in p.name) == ["steps.parquet"]
    assert sorted(p.name for p in other.iterdir() if "steps" in p.name) == ["steps.jsonl.gz"]
    parquet, lines = RunReader(folder).steps(), RunReader(other).steps()
    assert parquet.equals(lines)
    assert parquet.num_rows == 2 * 2 * 2 * 4


def test_the_table_has_a_row_per_step_layer_and_head(folder):
    logged(folder, (5,), "complete")
    made, table = arrays(5), RunReader(folder).steps().to_pylist()
    at = {(r["step"], r["layer"], r["head"]): r for r in table}
    assert set(at) == {(s, layer, h) for s in range(2) for layer in (0, 3) for h in range(4)}
    entry = at[1, 3, 2]
    assert entry["total_bound"] == made.total_bound[1, 1, 2]
    assert entry["blocks"] == made.blocks[1, 1]
    assert entry["paged_bytes"] == made.paged_bytes[1, 1]
    audited = not np.isnan(made.true_error[1, 1, 2])
    assert (entry["true_error"] is not None) == audited


def test_the_table_gives_the_arrays_back(folder):
    logged(folder, (5, 6), "complete")
    found = dict(steps.arrays_of(RunReader(folder).steps()))
    assert list(found) == ["k5", "k6"]
    for name in steps.UNITS:
        left, right = getattr(found["k6"], name), getattr(arrays(6), name)
        np.testing.assert_array_equal(left, right)
        assert left.dtype == right.dtype
    assert found["k6"].layers == (0, 3)


def test_a_run_without_certificates_has_no_table(folder):
    with RunWriter(folder) as writer:
        writer.append_row(row("a"))
    assert RunReader(folder).steps() is None


def summarised(**changes):
    """Two steps, one layer, two heads; figures that can be checked by hand."""
    shape = (2, 1, 2)
    base = {name: np.zeros(shape, np.float32) for name in steps.UNITS}
    base |= {
        "output_norm": np.full(shape, 1.0, np.float32),
        "total_bound": np.array([[[0.0, 0.2]], [[0.5, 0.75]]], np.float32),
        "true_error": np.array([[[0.0, np.nan]], [[np.nan, 0.5]]], np.float32),
        "violated": np.zeros(shape, bool),
        "exact": np.array([[[True, False]], [[False, False]]]),
        "rung": np.array([[[4, 1]], [[0, 1]]], np.int8),
        "promoted_key_blocks": np.array([[[4, 1]], [[0, 1]]], np.int32),
        "blocks": np.array([[4], [4]], np.int32),
        "paged_bytes": np.array([[100], [50]]),
    }
    arrays_ = StepArrays(**base | changes, layers=(0,))
    record = json.loads(gzip.decompress(steps.encode("s", "k", arrays_, 1)))
    return steps.certificate_summary([record])


def test_certificates_are_summed_over_head_steps():
    found = summarised()
    assert (found["head_steps"], found["certified"], found["exact"]) == (4, 3, 1)
    assert (found["violations"], found["audited"], found["unbounded"]) == (0, 2, 0)
    assert found["rungs"] == {"0": 1, "1": 2, "2": 0, "3": 0, "4": 1}
    # certified: .2/.8, .5/.5, .75/.25; nearest rank of 3 at 50 % is the second, at 95 % the third
    assert found["rel_bound_p50"] == pytest.approx(1.0)
    assert found["rel_bound_p95"] == pytest.approx(3.0)
    assert found["rel_error_max"] == pytest.approx(1.0)
    assert found["promoted_key_share"] == pytest.approx((1 + 0.25 + 0 + 0.25) / 4)
    assert found["promoted_value_share"] == 0
    assert found["host_to_device_bytes_per_step"] == 75


def test_a_bound_that_is_not_finite_is_null_with_a_status():
    bounds = np.array([[[0.0, np.inf]], [[0.5, 2.0]]], np.float32)
    found = summarised(total_bound=bounds)
    assert (found["rel_bound_p95"], found["rel_bound_p95_status"]) == (None, "unbounded")
    assert found["unbounded"] == 1


def test_what_was_not_audited_is_null_with_a_status():
    found = summarised(true_error=np.full((2, 1, 2), np.nan, np.float32))
    assert (found["rel_error_max"], found["rel_error_max_status"], found["audited"]) == (
        None,
        "not_audited",
        0,
    )


def test_without_any_step_there_is_no_summary():
    assert steps.certificate_summary([]) is None
