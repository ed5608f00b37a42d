"""The heartbeat line, its pace and its honesty about what is left."""

import io
import time

import pytest

from rcq_cli.glyphs import Glyphs, View
from rcq_cli.progress import EVERY_S, FIRST_S, Bar, Heartbeat, Silent, State, progress_for

PLAIN = View(width=80, color=False, glyphs=Glyphs(), terminal=False)
TERMINAL = View(width=80, color=False, glyphs=Glyphs(), terminal=True)


def test_the_line_is_the_documented_one():
    state = State(title="eval", planned=100, started=0.0)
    for done in range(1, 42):
        state.take(10.0 + 5 * (done - 1), "niah certified T=8192", done, 100, None, 12.3, 0)
    # 40 samples in 200 s, loading left out, leave 59 at 5 s each: 295 s
    assert state.line(210.0) == "eval 00:03:30 niah 41/100 certified T=8192 12.3 tok/s eta 04:55 errors 0"


def test_resumed_samples_take_no_time_in_the_estimate():
    state = State(title="eval", planned=100, started=0.0)
    state.take(10.0, "niah certified", 51, 100, 1.0, None, 0)
    assert state.eta_s(10.0) is None
    state.take(20.0, "niah certified", 52, 100, 1.0, None, 0)
    assert state.eta_s(20.0) == pytest.approx(480.0)


def test_the_estimate_covers_all_cells_not_the_current_one():
    state = State(title="compare", planned=20, started=0.0)
    for cell in ("niah dense", "niah naive"):
        for done in range(1, 6):
            state.take(1.0 if cell == "niah dense" else 10.0, cell, done, 10, None, None, 0)
    assert state.eta_s(10.0) == pytest.approx(10.0)


def test_controls_are_no_part_of_the_estimate():
    state = State(title="compare", planned=20, started=0.0)
    for done in range(1, 11):
        state.take(float(done), "niah dense T=1024", done, 10, None, None, 0)
        state.take(float(done), "niah controls dense T=1024", 10, 10, None, None, 0)
    assert state.eta_s(10.0) == pytest.approx(10.0)


def test_before_the_first_sample_the_line_says_so_and_promises_nothing():
    assert State(title="eval", planned=5).line(3.0) == "eval 00:00:03 preparing"


def test_what_goes_on_before_the_first_sample_is_named():
    out = io.StringIO()
    beat = Heartbeat(out, first_s=0.05, every_s=0.05)
    beat.start(0, "compare")
    beat.doing("matching kivi at 1024 to bytes=0.45 (1 of 2)")
    time.sleep(0.3)
    beat.update("niah dense", 1, 2)
    time.sleep(0.2)
    beat.close()
    first, *_, last = out.getvalue().splitlines()
    assert first == "compare 00:00:00 matching kivi at 1024 to bytes=0.45 (1 of 2)"
    assert last.startswith("compare 00:00:0")
    assert last.endswith("niah 1/2 dense errors 0")


def test_the_promised_pace_is_kept():
    assert FIRST_S <= 5
    assert EVERY_S == 30


def test_a_silent_worker_still_beats():
    out = io.StringIO()
    beat = Heartbeat(out, first_s=0.05, every_s=0.05)
    beat.start(10, "eval")
    time.sleep(0.4)
    beat.close()
    assert out.getvalue().count("eval 00:00:00 preparing\n") >= 2


def test_short_work_says_nothing():
    out = io.StringIO()
    beat = Heartbeat(out)
    beat.start(1, "eval")
    beat.update("niah dense", 1, 1, 1.0)
    beat.close()
    assert out.getvalue() == ""


def test_closing_twice_and_a_closed_stream_are_no_errors():
    out = io.StringIO()
    beat = Heartbeat(out, first_s=0.01, every_s=0.01)
    beat.start(1, "eval")
    out.close()
    time.sleep(0.05)
    beat.close()
    beat.close()


def test_notes_stay_in_the_log():
    out = io.StringIO()
    Heartbeat(out).note("resumed 4 samples")
    assert out.getvalue() == "resumed 4 samples\n"


def test_the_stream_decides_what_is_shown():
    assert isinstance(progress_for(io.StringIO(), PLAIN), Heartbeat)
    assert isinstance(progress_for(io.StringIO(), TERMINAL), Bar)
    assert isinstance(progress_for(io.StringIO(), TERMINAL, quiet=True), Silent)


def test_the_bar_shows_what_runs_how_far_and_the_score():
    class Tty(io.StringIO):
        def isatty(self) -> bool:
            return True

    out = Tty()
    bar = Bar(out, View(width=120, color=True, glyphs=Glyphs(), terminal=True))
    bar.start(4, "eval")
    bar.update("niah certified T=8192", 3, 4, 0.667, 10.0, 1)
    bar.note("one note")
    bar.close()
    shown = out.getvalue()
    for part in ("eval niah certified T=8192", "3/4", "score 0.667", "errors 1", "one note"):
        assert part in shown
