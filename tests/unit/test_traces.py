"""Stored certificates: what is shown, filtered, exported and compared is what was recorded."""

import csv
import dataclasses
import gzip
import io
import json
import sys

import numpy as np
import pyarrow.parquet as pq
import pytest

from rcq_cli import perfetto, traces
from rcq_cli.main import run
from rcq_cli.protocols import StepArrays
from rcq_cli.reports.timeline import BINS, gathered, levels
from rcq_cli.store import RunReader
from rcq_cli.traces import Filter
from tests.unit.stored_runs import ask, stored_run
from tests.unit.traced_runs import HEADS, LAYERS, STEPS, arrays, traced_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return traced_run(tmp_path_factory.mktemp("runs"))


def shown(folder, **wanted):
    return traces.show(RunReader(folder), Filter(**wanted))


def test_a_series_has_the_bounds_and_errors_of_each_step(folder):
    found = shown(folder)
    assert found["head_steps"] == 2 * STEPS * len(LAYERS) * HEADS
    for row in found["series"]:
        both = [arrays(i) for i in (0, 1)]
        bounds = np.concatenate([a.total_bound[row["step"]].ravel() for a in both]).astype(np.float64)
        assert row["bound_max"] == pytest.approx(float((bounds / (1 - bounds)).max()), rel=1e-6)
        assert row["error_max"] == pytest.approx(float((bounds / 4 / (1 - bounds / 4)).max()), rel=1e-6)
        assert row["tightest"] == pytest.approx(4, rel=1e-6)
        assert row["audited"] == 2 * len(LAYERS) * HEADS
    assert [row["rungs"][0] for row in found["series"][:3]] == [2 * len(LAYERS) * HEADS] * 3


def test_the_map_is_the_distribution_of_rungs_of_every_head(folder):
    found = shown(folder)["map"]
    assert [layer["layer"] for layer in found] == list(LAYERS)
    for place, layer in enumerate(found):
        for head, counts in enumerate(layer["rungs"]):
            expected = [0] * 5
            expected[0] += 2 * 3
            expected[(head + place) % 5] += 2 * 3
            assert counts == expected


def test_the_worst_steps_are_the_widest_bounds_of_each_layer_and_step(folder):
    found = shown(folder)["worst"]
    assert (found[0]["step"], found[0]["layer"], found[0]["head"]) == (STEPS - 1, LAYERS[-1], HEADS - 1)
    widths = [record["rel_bound"] for record in found]
    assert widths == sorted(widths, reverse=True)
    places = [(r["sample_id"], r["step"], r["layer"]) for r in found]
    assert len(set(places)) == len(places) == traces.WORST


@pytest.mark.parametrize(
    ("wanted", "count"),
    [
        ({"step": 2}, 2 * len(LAYERS) * HEADS),
        ({"layer": 5}, 2 * STEPS * HEADS),
        ({"head": 3, "layer": 7}, 2 * STEPS),
        ({"sample": "0"}, STEPS * len(LAYERS) * HEADS),
        ({"sample": "niah//8192/1", "step": 0}, len(LAYERS) * HEADS),
        ({"rung": 4}, 2 * 3 * sum((h + p) % 5 == 4 for h in range(HEADS) for p in range(len(LAYERS)))),
    ],
)
def test_filters_leave_what_they_name(folder, wanted, count):
    assert shown(folder, **wanted)["head_steps"] == count


def test_one_head_step_is_shown_in_full(folder):
    record = shown(folder, sample="1", step=4, layer=5, head=2)["head_step"]
    expected = arrays(1)
    assert record["total_bound"] == float(expected.total_bound[4, 1, 2])
    assert record["rung"] == 3
    assert record["paged_bytes"] == 100
    assert record["true_error"] == float(expected.true_error[4, 1, 2])


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--step", "99"), "step 0 to 5"),
        (("--layer", "3"), "layer 2 to 7"),
        (("--sample", "9"), "allowed: 0 to 1"),
        (("--head", "-1"), "0 or more"),
        (("--model", "needle"), "--model has no meaning for stored runs"),
        (("--format", "csv"), "belongs to export"),
    ],
)
def test_what_is_not_there_is_a_usage_error_that_says_what_is(folder, capsys, argv, told):
    code, out, err = ask(capsys, "trace", "show", str(folder), *argv)
    assert (code, out) == (2, "")
    assert told in err


@pytest.mark.parametrize(
    "argv", [("show",), ("diff", "x"), ("shwo", "x"), ("show", "nowhere"), ("show", "a", "b")]
)
def test_actions_need_their_runs(capsys, argv):
    assert ask(capsys, "trace", *argv)[0] == 2


def test_a_run_without_certificates_says_so(tmp_path, capsys):
    code, _, err = ask(capsys, "trace", "show", str(stored_run(tmp_path, "dense", [1.0])))
    assert code == 2
    assert "holds no certificates" in err


def test_a_violation_is_shown_and_ends_with_four(tmp_path, capsys):
    broken = traced_run(tmp_path, violated=True)
    code, out, _ = ask(capsys, "trace", "show", str(broken))
    assert code == 4
    assert "VIOLATED: 2 of 144" in out
    first = traces.show(RunReader(broken), Filter())["worst"][0]
    assert (first["step"], first["layer"], first["head"], first["violated"]) == (4, 5, 2, True)


def test_without_audits_the_true_error_is_unknown_not_zero(tmp_path, capsys):
    blind = traced_run(tmp_path, audited=False)
    code, out, _ = ask(capsys, "trace", "show", str(blind), "--json")
    found = json.loads(out)
    assert code == 0
    assert found["audited"] == 0
    assert all(row["error_max"] is None and row["tightest"] is None for row in found["series"])
    assert all(row["error_max_status"] == row["tightest_status"] == "not_audited" for row in found["series"])
    assert found["worst"][0]["true_error_status"] == "not_audited"
    assert "not audited" in ask(capsys, "trace", "show", str(blind))[1]


def test_a_head_step_that_nobody_asked_for_is_null_with_the_reason(tmp_path):
    folder = traced_run(tmp_path)
    assert (shown(folder)["head_step"], shown(folder)["head_step_status"]) == (None, "not_requested")
    assert "head_step_status" not in shown(folder, step=4, layer=5, head=2)


def test_a_step_without_any_error_has_no_tightest_bound_and_says_so():
    one = np.zeros(1)
    columns = {"step": [0], "true_error": one, "total_bound": one + np.inf, "rel_bound": one + np.inf,
               "rel_error": one, "violated": [0], "exact": [0], "rung": [0]}  # fmt: skip
    (row,) = traces.series(traces.Flat({name: np.asarray(v) for name, v in columns.items()}, ("s",)))
    assert (row["tightest"], row["tightest_status"]) == (None, "no_error")
    assert (row["bound_max"], row["bound_max_status"]) == (None, "unbounded")
    assert (row["error_max"], "error_max_status" in row) == (0.0, False)


def test_an_unfinished_run_reads_as_a_finished_one(tmp_path):
    parquet, lines = (traced_run(tmp_path, finish=finish) for finish in (True, False))
    assert (parquet / "steps.parquet").exists()
    assert not (lines / "steps.parquet").exists()
    one, two = shown(parquet), shown(lines)
    assert {**one, "run": ""} == {**two, "run": ""}


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp949"])
def test_show_writes_every_encoding_without_question_marks(folder, monkeypatch, encoding):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))
    assert run(["trace", "show", str(folder)]) == 0
    sys.stdout.flush()
    text = raw.getvalue().decode(encoding)
    assert "?" not in text
    glyphs = "\u2581\u2588" if encoding == "utf-8" else "_#"
    assert all(glyph in text for glyph in glyphs)


def test_lines_of_bars_are_logarithmic_and_mark_what_is_unknown():
    assert levels([0.001, 0.01, 0.1, None, 0.0]) == "047--"
    assert levels([2.0, 2.0]) == "00"
    assert len(gathered([1.0] * 1000, max)) <= BINS
    assert gathered([1.0, 5.0, None] * 64, max) == [5.0] * 64
    assert gathered([1.0, 5.0, None] * 64, min) == [1.0] * 64


# -- export -------------------------------------------------------------------------------------------------


def flat_rows(folder):
    return list(traces.flat(traces.recorded(RunReader(folder))).records())


def test_csv_jsonl_and_parquet_hold_the_same_head_steps(folder, capsys, tmp_path):
    lines = ask(capsys, "trace", "export", str(folder), "--format", "jsonl")[1]
    table = ask(capsys, "trace", "export", str(folder), "--format", "csv")[1]
    path = tmp_path / "x.parquet"
    assert ask(capsys, "trace", "export", str(folder), "--format", "parquet", "--to", str(path))[0] == 0
    from_lines = [json.loads(line) for line in lines.splitlines()]
    from_csv = list(csv.DictReader(io.StringIO(table)))
    from_parquet = pq.read_table(path).to_pylist()
    assert from_lines == flat_rows(folder)
    assert len(from_csv) == len(from_parquet) == len(from_lines) == 144
    for a, b, c in zip(from_lines, from_csv, from_parquet, strict=True):
        assert a["sample_id"] == b["sample_id"] == c["sample_id"]
        assert a["total_bound"] == float(b["total_bound"]) == c["total_bound"]
        assert a["rung"] == int(b["rung"]) == c["rung"]


def test_export_filters_and_refuses_parquet_on_stdout(folder, capsys):
    out = ask(capsys, "trace", "export", str(folder), "--format", "jsonl", "--step", "1", "--layer", "5")[1]
    assert {(r["step"], r["layer"]) for r in map(json.loads, out.splitlines())} == {(1, 5)}
    code, _, err = ask(capsys, "trace", "export", str(folder), "--format", "parquet")
    assert code == 2
    assert "--to PATH" in err
    for place in ("/no/such/place", "/proc/out", "", "."):
        for kind in ("perfetto", "csv", "parquet"):
            assert ask(capsys, "trace", "export", str(folder), "--format", kind, "--to", place)[0] == 2
    for words in (("export", "--format", "csv"), ("show",)):
        code, _, err = ask(capsys, "trace", words[0], str(folder), *words[1:], "--trace-every", "2")
        assert code == 2
        assert "--trace-every has no meaning" in err


def validated(document):
    """Check a trace as Perfetto reads it, in whole nanoseconds: phases, ids, time order, nesting per lane."""
    last, open_until = 0.0, {}
    for event in document["traceEvents"]:
        assert event["ph"] in "MXC"
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event["ts"] >= last
        last = event["ts"]
        if event["ph"] == "C":
            assert all(isinstance(value, int | float) for value in event["args"].values())
        if event["ph"] == "X":
            assert event["dur"] >= 0
            stack = open_until.setdefault((event["pid"], event["tid"]), [])
            start, spent = (round(1000 * event[name]) for name in ("ts", "dur"))
            while stack and stack[-1] <= start:
                stack.pop()
            assert not stack or start + spent <= stack[-1]
            stack.append(start + spent)
    return document["traceEvents"]


def test_the_perfetto_trace_is_valid_and_holds_every_step(folder, capsys):
    document = json.loads(ask(capsys, "trace", "export", str(folder), "--format", "perfetto")[1])
    events = validated(document)
    slices = [e for e in events if e["ph"] == "X" and e["tid"] == perfetto.STEPS]
    assert [e["dur"] for e in slices] == [1000.0 * (n + 1) for n in range(STEPS)] * 2
    counters = [e for e in events if e["ph"] == "C" and e["name"] == "relative bound, max"]
    assert len(counters) == 2 * STEPS
    assert document["displayTimeUnit"] == "ms"
    assert "truncated" not in document["otherData"]


def test_a_capped_trace_stops_slices_keeps_counters_and_says_so(folder):
    samples = traces.recorded(RunReader(folder))
    whole = perfetto.export(samples, "t", Filter())
    capped = perfetto.export(samples, "t", Filter(), max_mib=0.002)
    validated(capped.document)
    count = {
        phase: [sum(e["ph"] == phase for e in x.document["traceEvents"]) for x in (whole, capped)]
        for phase in "XC"
    }
    assert count["X"][1] < count["X"][0]
    assert count["C"][1] == count["C"][0]
    assert capped.truncated == capped.document["otherData"]["truncated"]


def long_sample(steps):
    """A sample of so many steps: the known ones over and over."""
    fields = {f.name: getattr(arrays(0), f.name) for f in dataclasses.fields(StepArrays)}
    grown = {
        name: value if name == "layers" else np.resize(value, (steps, *value.shape[1:]))
        for name, value in fields.items()
    }
    return traces.Recorded("long", StepArrays(**grown), tuple(range(1000, 1000 + steps)))


def test_a_trace_of_a_thousand_steps_is_valid_and_every_tenth_step_a_tenth_of_it():
    samples = [long_sample(1000)]
    counts = {}
    for every in (1, 10):
        events = validated(perfetto.export(samples, "t", Filter(), every=every).document)
        slices = [e for e in events if e["ph"] == "X" and e["tid"] == perfetto.STEPS]
        counts[every] = (len(slices), sum(e["name"] == "relative bound, max" for e in events))
        # a step stands where it was, whatever is left out between
        assert slices[-1]["ts"] == sum(range(1000, 2000 - every)) / 1e3
    assert counts == {1: (1000, 1000), 10: (100, 100)}


def test_a_packed_trace_has_the_same_bytes_each_time(folder, capsys, tmp_path):
    paths = [tmp_path / name for name in ("a.json.gz", "b.json.gz")]
    for path in paths:
        assert ask(capsys, "trace", "export", str(folder), "--to", str(path))[0] == 0
    assert paths[0].read_bytes() == paths[1].read_bytes()
    validated(json.loads(gzip.decompress(paths[0].read_bytes())))


# -- diff ---------------------------------------------------------------------------------------------------


def test_a_run_differs_from_itself_in_nothing(folder):
    found = traces.difference(RunReader(folder), RunReader(folder), Filter())
    assert (found["rung_up"], found["rung_down"], found["heads"], found["bound_ratio_p50"]) == (0, 0, [], 1.0)
    assert found["matched"] == 144


def test_a_diff_matches_head_steps_and_counts_the_rest(folder, tmp_path, capsys):
    other = traced_run(tmp_path, "certified:eps=0.1", samples=3, scale=2.0)
    code, out, _ = ask(capsys, "trace", "diff", str(folder), str(other), "--json")
    found = json.loads(out)
    assert code == 0
    assert (found["matched"], found["only_first"], found["only_second"]) == (144, 0, 72)
    assert found["bound_ratio_p50"] == pytest.approx(2)
    text = ask(capsys, "trace", "diff", str(folder), str(other))[1]
    assert "72 in B alone" in text


def test_runs_of_other_prompts_are_not_diffed(folder, tmp_path, capsys):
    other = traced_run(tmp_path)
    record = json.loads((other / "contract.json").read_text())
    record["fields"]["task.seed"] = 7
    (other / "contract.json").write_text(json.dumps(record))
    summary = other / "summary.json"  # as if that run had been finished so
    summary.unlink()
    code, out, err = ask(capsys, "trace", "diff", str(folder), str(other))
    assert (code, out) == (5, "")
    assert "task.seed" in err


def test_runs_without_a_common_head_step_cannot_be_compared(folder, tmp_path, capsys):
    other = traced_run(tmp_path, samples=1)
    lines = (other / "examples.jsonl").read_text()
    assert "niah//8192/0" in lines
    code, _, err = ask(capsys, "trace", "diff", str(folder), str(other), "--sample", "niah//8192/1")
    assert code == 2
    assert "not in the run" in err


def test_recording_audits_every_step_unless_told_otherwise():
    from rcq_cli.commands._options import flags_of
    from rcq_cli.commands.trace import audited
    from rcq_cli.presets import resolve

    free, told = (audited(resolve("trace", flags_of(audit=share))) for share in (None, "0"))
    assert {spec.audit for batch in free.batches for spec in batch} == {1.0}
    assert {spec.audit for batch in told.batches for spec in batch} == {0.0}
