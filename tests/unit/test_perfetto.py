"""What `rcq trace export` writes opens in Perfetto: its own trace processor counts what rcq recorded."""

import json

import pytest

from benchmarks import _perfetto
from tests.unit.stored_runs import ask
from tests.unit.traced_runs import HEADS, LAYERS, traced_run

pytestmark = pytest.mark.skipif(_perfetto.chromium() is None, reason="Chromium is not installed")

LONG = 1000
MS = 1_000_000
QUERIES = {
    "processes": "select name from process where pid = 1",
    "lanes": """select thread.name, count() as slices, sum(dur) as dur, max(ts) as last
        from slice join thread_track on slice.track_id = thread_track.id join thread using (utid)
        group by 1 order by 1""",
    "tracks": """select track.name, count() as points, max(value) as highest, sum(value) as total
        from counter join process_counter_track as track on counter.track_id = track.id
        group by 1 order by 1""",
    "slices": "select count() as n from slice",
    "points": "select count() as n from counter",
    "depth": "select max(depth) as deepest from slice",
    "step": """select name, dur, extract_arg(arg_set_id, 'args.audited') as audited,
        extract_arg(arg_set_id, 'args.violations') as violations from slice where name = 'step 999'""",
    "broken": "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
}


def exported(run, target, capsys):
    """Write the trace of a run as a user would, and return its bytes."""
    code, out, err = ask(capsys, "trace", "export", str(run), "--format", "perfetto", "--to", str(target))
    assert (code, out, err) == (0, "", "")
    return target.read_bytes()


def relative(bound):
    return bound / (1 - bound)


def test_a_thousand_steps_open_in_perfetto_with_everything_that_was_written(tmp_path, capsys):
    run = traced_run(tmp_path / "runs", samples=1, steps=LONG, scale=0.01)
    found = _perfetto.ask(exported(run, tmp_path / "trace.json.gz", capsys), QUERIES)
    assert found["broken"] == []
    assert [row["name"] for row in found["processes"]] == ["niah 8192 certified needle"]
    # the steps took 1, 2, ... ms one after the other
    whole = LONG * (LONG + 1) // 2 * MS
    assert found["lanes"] == [
        {"name": "decode steps", "slices": LONG, "dur": whole, "last": whole - LONG * MS},
        {"name": "samples", "slices": 1, "dur": whole, "last": 0},
    ]
    assert found["depth"] == [{"deepest": 0}]
    assert found["step"] == [
        {"name": "step 999", "dur": LONG * MS, "audited": len(LAYERS) * HEADS, "violations": 0}
    ]
    tracks = {row["name"]: row for row in found["tracks"]}
    assert sorted(tracks) == [
        "above rung 0 (head-steps)",
        "relative bound, max (ratio)",
        "relative bound, p50 (ratio)",
        "relative true error, max (ratio)",
        "violations (head-steps)",
    ]
    assert {row["points"] for row in tracks.values()} == {LONG}
    # the widest bound is the last step's, in the last layer and head; the true error is a quarter of it
    widest = 0.01 * (0.01 + 0.01 * (LONG - 1) + 0.001 * (len(LAYERS) - 1) + 0.0001 * (HEADS - 1))
    highest = {name: row["highest"] for name, row in tracks.items()}
    assert highest["relative bound, max (ratio)"] == pytest.approx(relative(widest), rel=1e-6)
    assert highest["relative true error, max (ratio)"] == pytest.approx(relative(widest / 4), rel=1e-6)
    # from step 3 on all but two of twelve heads are above rung 0
    assert tracks["above rung 0 (head-steps)"]["total"] == 10 * (LONG - 3)
    assert tracks["violations (head-steps)"]["total"] == 0
    assert (found["slices"], found["points"]) == ([{"n": LONG + 1}], [{"n": 5 * LONG}])


def test_what_was_not_audited_has_no_track_in_perfetto_and_what_is_unbounded_no_point(tmp_path, capsys):
    # bounds reach the norm of the output, 1, at step 99
    run = traced_run(tmp_path / "runs", samples=2, steps=200, audited=False)
    found = _perfetto.ask(exported(run, tmp_path / "trace.json", capsys), QUERIES)
    assert found["broken"] == []
    points = {row["name"]: row["points"] for row in found["tracks"]}
    assert "relative true error, max (ratio)" not in points
    assert points["violations (head-steps)"] == 2 * 200
    assert points["relative bound, max (ratio)"] == 2 * 99
    lanes = {row["name"]: row["slices"] for row in found["lanes"]}
    assert lanes == {"decode steps": 2 * 200, "samples": 2}


def test_perfetto_counts_a_slice_that_overlaps_another_as_an_error(tmp_path, capsys):
    """What the other tests ask finds a fault where there is one."""
    run = traced_run(tmp_path / "runs", samples=1)
    document = json.loads(exported(run, tmp_path / "trace.json", capsys))
    step = next(event for event in document["traceEvents"] if event["name"] == "step 2")
    step["dur"] *= 1.5
    found = _perfetto.ask(json.dumps(document).encode(), {"broken": QUERIES["broken"]})
    assert found["broken"] == [{"name": "slice_drop_overlapping_complete_event", "value": 1}]
