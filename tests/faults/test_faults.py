"""Every fault is injected twenty times; none may end in a result that is silently wrong."""

from collections import Counter

import pytest

from rcq_cli.errors import BrokenRun
from tests.faults import foreign, hub, machine, memory, model

TIMES = 20
CASES = {**memory.CASES, **model.CASES, **machine.CASES, **foreign.CASES}


@pytest.mark.parametrize("name", CASES)
def test_a_fault_never_ends_in_a_silently_wrong_result(name, tmp_path):
    seen = Counter()
    for seed in range(TIMES):
        folder = tmp_path / str(seed)
        folder.mkdir()
        outcome = CASES[name](seed, folder)
        assert outcome in ("exact", "error"), f"{name}: seed {seed} came out {outcome}"
        seen[outcome] += 1
    assert seen.total() == TIMES


@pytest.mark.parametrize("name", memory.CASES)
def test_damage_in_memory_is_always_noticed(name, tmp_path):
    """Nothing above could tell a check from luck if damage were allowed to pass unseen."""
    assert {memory.CASES[name](seed, tmp_path) for seed in range(6)} == {"error"}


def test_without_the_check_at_the_end_damage_would_pass(tmp_path, monkeypatch):
    """The control of the test above: some of it is met by no step."""
    monkeypatch.setattr("rcq_cli.api.LayerCache.verify", lambda _self: None)
    seen = Counter(memory.changed_code(seed, tmp_path) for seed in range(12))
    assert seen["exact"] + seen["wrong"] > 0


def test_kills_hit_every_kind_of_call(tmp_path):
    """The number of calls that kills are spread over is that of a whole run."""
    with machine.stubs(), machine.Disk(10**9, machine.die).mounted() as disk:
        machine.execute(tmp_path, machine.Engine())
    assert 0.9 * disk.calls <= machine.CALLS <= disk.calls


def test_a_disk_that_fails_at_once_leaves_nothing_behind(tmp_path):
    with machine.stubs(), machine.Disk(0, machine.failing(28)).mounted(), pytest.raises(BrokenRun):
        machine.execute(tmp_path / "run", machine.Engine())


@pytest.mark.parametrize("seed", range(len(hub.FAULTS)), ids=hub.FAULTS)
def test_a_hub_that_breaks_off_leaves_nothing_half_done(seed, tmp_path):
    """Each way once: a download takes seconds, `benchmarks/faults.py` injects twenty."""
    place = tmp_path / "it"
    place.mkdir()
    assert hub.cut_download(seed, place) == "error"
