"""Phases of a step: own times that sum, nothing lost, nothing charged twice, nothing paid when off."""

import random
import time

import pytest

from rcq_cli.engine.clock import CpuClock, CudaClock, StepTimes, clock_for
from rcq_cli.phases import PHASES, UNATTRIBUTED, covers, listening, phase, phased


class Script:
    """A clock hand that moves only when told to."""

    def __init__(self):
        self.at = 0

    def __call__(self):
        return self.at


def test_phases_of_known_length_sum_to_the_step_within_five_per_cent():
    clock, lengths = CpuClock(), {"score": 0.010, "select": 0.005, "attend": 0.020}
    with listening(clock):
        clock.begin()
        time.sleep(0.004)
        for name, seconds in lengths.items():
            with phase(name):
                time.sleep(seconds)
        clock.end()
    step = clock.steps()[0]
    for name, seconds in lengths.items():
        # a sleep never ends early; a busy machine may let it end late, which the sum below cannot hide
        assert step.of(name) >= seconds * 1e9
    total = sum(step.phase_ns.values()) + step.unattributed_ns
    assert total == pytest.approx(step.step_ns, rel=0.05)
    assert step.unattributed_ns >= 4e6


def test_scripted_phases_have_their_lengths_to_the_nanosecond():
    hand = Script()
    clock = CpuClock(hand)
    with listening(clock):
        for _ in range(3):
            clock.begin()
            for name, length in (("model", 7), ("attend", 30), ("model", 3)):
                with phase(name):
                    hand.at += length
                hand.at += 1
            clock.end()
    assert clock.steps() == [StepTimes(43, {"model": 10, "attend": 30}, {"model": 2, "attend": 1})] * 3
    assert clock.steps()[0].unattributed_ns == 3


def test_an_inner_phase_stops_the_outer_one():
    hand = Script()
    clock = CpuClock(hand)
    clock.begin()
    with listening(clock), phase("model"):
        hand.at += 5
        with phase("attend"):
            hand.at += 2
            with phase("page_in"):
                hand.at += 100
            hand.at += 3
        hand.at += 1
    clock.end()
    assert clock.steps()[0].phase_ns == {"model": 6, "attend": 5, "page_in": 100}
    assert clock.steps()[0].unattributed_ns == 0


def test_an_exception_closes_the_phases_it_leaves():
    hand = Script()
    clock = CpuClock(hand)

    @phased("attend")
    def breaks():
        hand.at += 4
        raise KeyError

    clock.begin()
    with listening(clock), pytest.raises(KeyError), phase("model"):
        breaks()
    clock.end()
    assert clock.steps()[0].phase_ns == {"model": 0, "attend": 4}


def test_without_a_clock_nothing_is_heard_and_functions_work():
    @phased("score")
    def twice(x):
        return 2 * x

    clock = CpuClock()
    with listening(clock):
        pass
    with phase("attend"):
        assert twice(4) == 8
    clock.begin()
    clock.end()
    assert clock.steps()[0].phase_ns == {}


def test_a_mark_without_a_clock_costs_less_than_two_microseconds():
    # of this process: what others do on the machine is not the mark's cost
    began = time.process_time_ns()
    for _ in range(20_000):
        with phase("score"):
            pass
    assert (time.process_time_ns() - began) / 20_000 < 2_000


def test_unknown_phases_and_unclosed_ones_are_defects():
    clock = CpuClock()
    clock.begin()
    with pytest.raises(ValueError, match="scoring"):
        clock.enter("scoring")
    clock.enter("score")
    with pytest.raises(ValueError, match="score"):
        clock.end()


def test_a_phase_that_never_ran_has_no_time_but_what_is_left_always_has():
    step = StepTimes(10, {"model": 4}, {"model": 1})
    assert (step.of("model"), step.of("fallback"), step.of(UNATTRIBUTED)) == (4, None, 6)


class Event:
    """A device event on a scripted hand, in milliseconds as torch counts."""

    made = 0

    def __init__(self, hand):
        self.hand, self.at = hand, None
        Event.made += 1

    def record(self):
        self.at = self.hand.at

    def elapsed_time(self, other):
        return (other.at - self.at) / 1e6


def test_both_clocks_agree_on_random_nesting_and_the_ring_waits_once_a_window():
    draw, hand, waits = random.Random(3), Script(), []
    host = CpuClock(hand)
    device = CudaClock(window=4, event=lambda: Event(hand), wait=lambda: waits.append(1))
    Event.made = 0

    def play(depth):
        for _ in range(draw.randrange(3)):
            name = draw.choice(PHASES)
            host.enter(name)
            device.enter(name)
            hand.at += draw.randrange(1000)
            if depth:
                play(depth - 1)
            host.leave()
            device.leave()
            hand.at += draw.randrange(50)

    for _ in range(12):
        host.begin()
        device.begin()
        play(3)
        host.end()
        device.end()
    assert len(waits) == 3
    assert device.steps() == host.steps()
    assert len(waits) == 3
    borders = sum(2 + 2 * sum(step.entries.values()) for step in host.steps())
    assert Event.made < borders


def test_the_clock_of_a_device():
    assert isinstance(clock_for("cpu"), CpuClock)
    assert isinstance(clock_for("cuda:1"), CudaClock)


def layered_step(clock, hand):
    """Two layers: the model takes 10 and 7 around them, the layers 1 + 4 + 2 and 1 + 8."""
    with listening(clock):
        clock.begin()
        with phase("model"):
            hand.at += 10_000_000
            for parts in ((("append", 1), ("attend", 4), ("bound", 2)), (("append", 1), ("attend", 8))):
                for name, ms in parts:
                    with phase(name):
                        hand.at += ms * 1_000_000
            hand.at += 7_000_000
            covers("attend", "page_in")
        clock.end()


def clocks(hand, every):
    return [CpuClock(hand, every), CudaClock(event=lambda: Event(hand), wait=lambda: None, every=every)]


def test_layers_are_told_apart_in_every_second_step_on_both_clocks():
    hand = Script()
    for clock in clocks(hand, 2):
        for _ in range(3):
            layered_step(clock, hand)
        first, second, third = clock.steps()
        for step in (first, third):
            assert [dict(layer) for layer in step.layers] == [
                {"append": 1_000_000, "attend": 4_000_000, "bound": 2_000_000},
                {"append": 1_000_000, "attend": 8_000_000},
            ]
        assert list(second.layers) == []
        assert first.phase_ns == second.phase_ns
        assert first.phase_ns["attend"] == 12_000_000
        assert second.covered == {"page_in": "attend"}


def test_layers_are_not_told_apart_unless_asked():
    hand = Script()
    for clock in clocks(hand, 0):
        layered_step(clock, hand)
        assert list(clock.steps()[0].layers) == []


def test_what_a_phase_covers_is_forgotten_at_the_next_step():
    hand = Script()
    for clock in clocks(hand, 0):
        layered_step(clock, hand)
        clock.begin()
        clock.end()
        assert clock.steps()[1].covered == {}
