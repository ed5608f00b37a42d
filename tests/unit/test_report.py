"""The HTML report: one file, offline, the same bytes for the same runs, nothing hidden, nothing injected."""

import json
import re
import shutil
import xml.etree.ElementTree as ET
from html.parser import HTMLParser
from importlib import resources

import pytest

from rcq_cli.page import plots, svg
from rcq_cli.page.page import _spans
from tests.unit.stored_runs import ask, stored_run
from tests.unit.traced_runs import traced_run


class Reader(HTMLParser):
    """Text that is read without JavaScript, and every attribute."""

    def __init__(self):
        super().__init__()
        self.stack, self.words, self.attributes, self.data = [], [], [], ""

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in ("meta", "br", "rect", "line", "circle", "path"):
            self.stack.append(tag)

    def handle_endtag(self, tag):
        if tag in self.stack:
            while self.stack.pop() != tag:
                pass

    def handle_data(self, data):
        if self.stack and self.stack[-1] == "script":
            self.data = self.data or data
        elif self.stack and self.stack[-1] != "style":
            self.words.append(data)


def read(path):
    reader = Reader()
    reader.feed(path.read_text("utf-8"))
    return reader


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Dense, naive that loses needles, and two runs with certificates."""
    out = tmp_path_factory.mktemp("runs")
    scores = [1.0] * 60
    stored_run(out, "dense", scores, ctx=4096)
    stored_run(out, "naive", [float(i % 2) for i in range(60)], ctx=4096)
    traced_run(out, "certified", samples=3, ctx=8192)
    traced_run(out, "certified:eps=0.1", samples=2, ctx=8192, scale=2.0)
    return sorted(out.iterdir())


def report(capsys, tmp_path, *sources, name="r.html"):
    path = tmp_path / name
    code, out, err = ask(capsys, "report", *map(str, sources), "-o", str(path))
    return code, out, err, path


def test_the_report_names_its_file_and_nothing_else_on_stdout(runs, capsys, tmp_path):
    code, out, err, path = report(capsys, tmp_path, *runs)
    assert (code, out, err) == (0, f"{path}\n", "")
    assert path.stat().st_size < 2 << 20


def test_the_same_runs_give_the_same_bytes_in_any_order_and_place(runs, capsys, tmp_path):
    first = report(capsys, tmp_path, *runs)[3].read_bytes()
    moved = [shutil.copytree(run, tmp_path / "elsewhere" / run.name) for run in reversed(runs)]
    assert report(capsys, tmp_path, *moved, name="s.html")[3].read_bytes() == first
    assert str(tmp_path).encode() not in first


def test_nothing_is_fetched_from_anywhere(runs, capsys, tmp_path):
    path = report(capsys, tmp_path, *runs)[3]
    text = path.read_text("utf-8")
    assert "://" not in text
    assert "@import" not in text
    assert re.findall(r"url\(", text) == []
    page = read(path)
    assert all(value.startswith("#") for _, name, value in page.attributes if name in ("src", "href"))
    policy = next(value for tag, name, value in page.attributes if tag == "meta" and name == "content")
    assert policy.startswith("default-src 'none'")
    assert "connect-src" not in policy


def test_every_drawing_is_well_formed_and_has_a_title(runs, capsys, tmp_path):
    text = report(capsys, tmp_path, *runs)[3].read_text("utf-8")
    drawings = re.findall(r"<svg.*?</svg>", text, flags=re.DOTALL)
    assert len(drawings) >= 5
    for drawing in drawings:
        root = ET.fromstring(drawing)
        assert root[0].tag == "title"
        for element in root.iter():
            for name in ("x", "y", "width", "height", "cx", "cy"):
                assert float(element.get(name, "0")) >= 0


def test_every_section_reads_without_javascript(runs, capsys, tmp_path):
    page = read(report(capsys, tmp_path, *runs)[3])
    words = " ".join(page.words)
    for told in (
        "EXPECTED FAIL naive against dense, niah@4k",
        "certificates hold certified, niah@8k",
        "fields are the same in all 4 runs",
        "a dense cache of 16-bit elements",
        "the head-steps to look at first",
        "score by needle depth and context, dense",
        "accuracy against tier 1",
        "accuracy against device and host",
    ):
        assert told in words


def test_tables_name_the_runs_by_numbers_that_are_told_once(runs, capsys, tmp_path):
    path = report(capsys, tmp_path, *runs)[3]
    text, named = path.read_text("utf-8"), json.loads(read(path).data)["runs"]
    contract = text.partition('<section id="contract">')[2].partition("</section>")[0]
    assert [contract.count(run.name) for run in runs] == [1] * 4
    listed = "".join(f"<li>{run['name']}</li>" for run in named)
    assert f'<ol class="runs">{listed}</ol>' in contract
    assert "<td>task.ctx</td><td>1-2</td><td" in contract
    assert "<td>task.ctx</td><td>3-4</td><td" in contract


@pytest.mark.parametrize(
    ("numbers", "told"), [([1], "1"), ([1, 3, 4, 5, 7, 8], "1, 3-5, 7-8"), ([2, 4], "2, 4")]
)
def test_neighbouring_numbers_are_drawn_together(numbers, told):
    assert _spans(numbers) == told


def test_links_wrap_in_a_narrow_window():
    css = resources.files("rcq_cli.page").joinpath("page.css").read_text("utf-8")
    assert re.search(r"nav \{[^}]*flex-wrap: wrap", css)


def test_the_data_of_every_number_is_in_the_file(runs, capsys, tmp_path):
    document = json.loads(read(report(capsys, tmp_path, *runs)[3]).data)
    assert (document["schema"], document["command"]) == (1, "report")
    assert [run["mode"] for run in document["runs"]] == ["dense", "naive", "certified", "certified:eps=0.1"]
    assert document["pairs"][0]["verdict"] == "fail"
    assert [shown["head_steps"] for shown in document["traces"]] == [216, 144]
    heat = next(h for h in document["heatmaps"] if h["mode"] == "naive")
    assert sum(row["cells"][0]["n"] for row in heat["rows"]) == 60


def test_names_cannot_inject_anything(tmp_path, capsys):
    evil = "x</script><script>alert(1)</script><b>"
    run = traced_run(tmp_path, "certified", samples=1, model=evil)
    path = report(capsys, tmp_path, run)[3]
    text = path.read_text("utf-8")
    assert "alert(1)</script>" not in text
    assert text.count("<script") == 2
    assert evil in " ".join(read(path).words)
    assert json.loads(read(path).data)["cells"][0]["model"] == evil


def test_a_violation_is_red_on_top_and_ends_with_four(tmp_path, capsys):
    run = traced_run(tmp_path, violated=True)
    code, _, err, path = report(capsys, tmp_path, run)
    assert code == 4
    assert "violated" in err
    text = path.read_text("utf-8")
    assert 'class="chip bad"><b>CERTIFICATE VIOLATED certified, niah@8k' in text
    assert 'class="ring"' in text
    assert '<td class="bad">VIOLATED</td>' in text


def test_what_was_not_audited_is_not_called_sound(tmp_path, capsys):
    text = report(capsys, tmp_path, traced_run(tmp_path, audited=False))[3].read_text("utf-8")
    assert "not audited certified" in text
    assert "certificates hold" not in text


def test_runs_that_must_not_be_compared_stand_without_a_verdict(tmp_path, capsys):
    one = stored_run(tmp_path / "a", "dense", [1.0] * 5)
    two = stored_run(tmp_path / "b", "naive", [1.0] * 5, fields={"model.id": "another"})
    code, _, _, path = report(capsys, tmp_path, one, two)
    assert code == 0
    document = json.loads(read(path).data)
    assert document["pairs"] == []
    assert "model.id" in document["refusals"][0]
    assert "not compared" in " ".join(read(path).words)


def test_verdicts_do_not_depend_on_what_else_is_in_the_report(tmp_path, capsys):
    """Holm counts the cells of one comparison: the runs of another model are none of them."""
    scores = {"dense": [1.0] * 12, "naive": [1.0] * 6 + [0.0] * 6}
    mine = [stored_run(tmp_path / "a", mode, found) for mode, found in scores.items()]
    other = {"model": "smollm2-135m", "fields": {"model.id": "smollm2-135m"}}
    theirs = [stored_run(tmp_path / "b", mode, [1.0] * 9 + [0.0] * 3, **other) for mode in scores]

    def judged(*runs):
        path = report(capsys, tmp_path, *runs)[3]
        return json.loads(read(path).data), " ".join(read(path).words)

    alone, both = judged(*mine)[0], judged(*mine, *theirs)
    assert [pair["holm_family"] for pair in both[0]["pairs"]] == [1, 1]
    assert both[0]["pairs"][0] == alone["pairs"][0]
    assert [pair["model"] for pair in both[0]["pairs"]] == ["needle", "smollm2-135m"]
    assert "naive against dense, niah@8k, smollm2-135m" in both[1]
    maps = [(found["model"], found["mode"]) for found in both[0]["heatmaps"]]
    assert sorted(maps) == [(m, mode) for m in ("needle", "smollm2-135m") for mode in ("dense", "naive")]
    assert both[0]["refusals"] == []


def test_a_run_without_a_dense_one_of_its_kind_is_told(tmp_path, capsys):
    one = stored_run(tmp_path / "a", "dense", [1.0] * 12)
    two = stored_run(tmp_path / "b", "naive", [1.0] * 12)
    other = stored_run(tmp_path / "c", "certified", [1.0] * 12, fields={"task.prompts_sha256": "another"})
    document = json.loads(read(report(capsys, tmp_path, one, two, other)[3]).data)
    assert [pair["candidate"] for pair in document["pairs"]] == ["naive"]
    assert document["refusals"][0].startswith("dense and certified cannot be compared: ")
    assert "task.prompts_sha256" in document["refusals"][0]


def test_an_unfinished_run_is_shown_as_one(tmp_path, capsys):
    run = traced_run(tmp_path, finish=False)
    code, _, _, path = report(capsys, tmp_path, run)
    assert code == 0
    assert "run is started" in " ".join(read(path).words)


PROFILE = {
    "schema": 1, "command": "profile", "ctx": 8192, "mode": "certified", "model": "needle", "task": "niah",
    "dtype": "float32", "backend": "cpu", "threads": 2, "ratio_to_dense": 0.5, "ratio_ci": [0.4, 0.6],
    "phases": [
        {"name": "model", "p50_ms": 3.0, "p90_ms": None, "share": 0.75, "bytes": 8, "gb_per_s": 2.0,
         "ceiling_share": 0.1, "status": "ok", "calls": 1},
        {"name": "attend", "p50_ms": 1.0, "p90_ms": None, "share": 0.25, "bytes": None, "gb_per_s": None,
         "ceiling_share": None, "status": "ok", "calls": 1},
        {"name": "score", "p50_ms": None, "p90_ms": None, "share": None, "bytes": None, "gb_per_s": None,
         "ceiling_share": None, "status": "merged", "detail": "inside attend", "calls": 0},
    ],
    "step_ms": {"n": 5, "p50": 4.0, "p90": None, "p90_status": "needs n >= 29, n is 5", "p99": None,
                "max": 5.0, "mean": 4.0, "outliers": 0},
    "dense_step_ms": {"p50": 8.0}, "ratio": {"verdict": "faster", "reason": ""},
    "warmup": {"warmup_steps": 16, "settled": True, "cold_first_ms": 90.0},
    "bandwidth": {"read_gb_per_s": 20.0, "read_gb_per_s_source": "2 threads"}, "attribution": None,
    "memory": {
        "ledger": [{"tier": "device", "item": "codes", "bytes": 10}], "tier1_bytes": 10,
        "device_total_bytes": 12, "system_total_bytes": 30, "dense_equivalent_bytes": 20, "peaks": {},
        "vm_hwm_bytes": 5, "rss_anon_bytes": 3, "rss_file_bytes": 2,
        "allocator": {"value": None, "status": "not_applicable", "detail": "cpu"},
        "nvml": {"value": None, "status": "no_driver", "detail": ""},
    },
}  # fmt: skip


def test_a_profile_adds_the_phases_of_the_step(runs, capsys, tmp_path):
    (tmp_path / "p.json").write_text(json.dumps(PROFILE))
    code, _, _, path = report(capsys, tmp_path, runs[0], tmp_path / "p.json")
    assert code == 0
    words = " ".join(read(path).words)
    assert "phases of the step" in words
    assert "dense, median step 8 ms" in words
    assert "score: merged (inside attend)" in words


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        ((), "at least one run folder"),
        (("nowhere",), "does not exist"),
        (("{run}", "-o", "/no/such/folder/x.html"), "no folder"),
        (("{file}",), "no document of rcq profile"),
    ],
)
def test_sources_and_targets_that_do_not_fit_are_usage_errors(runs, tmp_path, capsys, argv, told):
    (tmp_path / "x.json").write_text("{}")
    words = [word.format(run=runs[0], file=tmp_path / "x.json") for word in argv]
    code, out, err = ask(capsys, "report", *words)
    assert (code, out) == (2, "")
    assert told in err
    assert err.count("\n") == 1


def test_thirty_runs_of_a_large_model_stay_below_two_mebibytes():
    from rcq_cli.page.page import render

    map_ = [{"layer": n, "heads": list(range(32)), "rungs": [[n, 3, 2, 1, 0]] * 32} for n in range(1, 33)]
    row = {"bound_p50": 0.01, "bound_max": 0.02, "error_max": 0.001, "tightest": 9.0, "audited": 9,
           "violations": 0, "exact": 0, "rungs": [5, 3, 2, 1, 0]}  # fmt: skip
    worst = {"sample_id": "s", "step": 1, "layer": 1, "head": 1, "rung": 1, "violated": False}
    bounds = ("rel_bound", "rel_error", "key_bound", "value_bound", "dropped_bound", "rounding_bound")
    worst |= dict.fromkeys((*bounds, "true_error"), 0.01)
    shown = {
        "task": "niah", "ctx": 65536, "mode": "certified", "model": "m", "eps": 0.05, "head_steps": 49152,
        "audited": 1, "violations": 0, "exact": 0, "rungs": [5, 3, 2, 1, 0], "map": map_,
        "series": [row | {"step": n} for n in range(48)], "worst": [worst] * 10,
    }  # fmt: skip
    document = {
        "title": "t", "header": "h", "pairs": [], "cells": [], "refusals": [], "problems": [], "notes": [],
        "contract": {"runs": [], "common": {}, "differing": {}}, "profiles": [], "heatmaps": [],
        "environment": {}, "runs": [], "traces": [shown] * 30,
    }  # fmt: skip
    assert len(render(document).encode()) < 2 << 20


def test_the_frontier_holds_what_nothing_beats():
    points = {"a": (0.4, 0.9), "b": (0.5, 0.9), "c": (1.0, 1.0), "d": (0.3, 0.5), "e": (0.3, 0.5)}
    assert plots.frontier(points) == {"a", "c", "d", "e"}


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (0.0, 1.12, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.43, 1.0, [0.5, 0.6, 0.7, 0.8, 0.9, 1.0]),
        (0.5, 0.5, [0.5]),
        (3.1, 45.0, [10, 20, 30, 40]),
    ],
)
def test_ticks_are_round_numbers_inside_the_axis(low, high, expected):
    assert plots.ticks(low, high) == pytest.approx(expected)


def test_text_and_attributes_are_escaped():
    assert svg.tag("a", svg.text("<&>"), b='"<') == '<a b="&quot;&lt;">&lt;&amp;&gt;</a>'
    assert [svg.number(value) for value in (-0.004, 0, 2.0, 1.236)] == ["0", "0", "2", "1.24"]


def test_the_ramp_gets_lighter_and_its_ink_stays_readable():
    def luminance(value):
        return sum(w * int(value[i : i + 2], 16) for w, i in ((0.299, 1), (0.587, 3), (0.114, 5)))

    ramp = [luminance(svg.colour(i / 10)) for i in range(11)]
    assert ramp == sorted(ramp)
    for i in range(11):
        paper, ink = svg.colour(i / 10), svg.ink(i / 10)
        assert abs(luminance(paper) - (0 if ink == "#000" else 255)) > 80
