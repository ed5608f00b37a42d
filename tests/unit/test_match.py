"""Budgets of equal bytes: the search, the flag, and a comparison that holds them."""

import json

import pytest

from rcq_cli.commands._match import has_budget, parse_match, search
from rcq_cli.engine.decoder import Engine
from rcq_cli.errors import SpecError
from tests.unit.stored_runs import ask


@pytest.mark.parametrize("share", [0.1, 0.37, 0.9])
@pytest.mark.parametrize(
    "ratio",
    [
        lambda f: 2 * f,
        lambda f: 0.03 + 1.1 * f,
        lambda f: f**2,
        lambda f: round(200 * f) / 200,
        lambda f: f + 0.02 * (f > 0.3),
    ],
    ids=["float32", "constant part", "curved", "steps", "jump"],
)
def test_the_search_comes_within_two_percent_of_any_growing_ratio(share, ratio):
    calls = []

    def measure(fraction):
        calls.append(fraction)
        return ratio(fraction)

    found = search(measure, share)
    assert found.ratio == ratio(found.fraction)
    assert abs(found.ratio / share - 1) <= (0.05 if share == 0.1 and ratio(0.001) == 0 else 0.02)
    assert len(calls) <= 13


def test_a_floor_above_the_share_is_found_as_the_nearest():
    found = search(lambda f: max(0.5, 2 * f), 0.3)
    assert found.ratio == 0.5


@pytest.mark.parametrize(
    "text", ["0.44", "bytes", "bytes=x", "bytes=0", "bytes=-1", "bytes=1e-320", "bytes=nan", "tokens=0.4"]
)
def test_what_is_no_share_is_refused(text):
    with pytest.raises(SpecError, match="bytes=SHARE"):
        parse_match(text)


def test_only_modes_that_take_all_three_budgets_have_one():
    assert has_budget({"keep_tokens": None, "keep_fraction": None, "budget_bytes": None, "x": 1})
    assert not has_budget({"group": 32})


def test_a_budget_and_match_together_are_refused(capsys):
    words = "compare dense tova:keep_tokens=50 --model needle --ctx 1k --samples 1 --match bytes=0.4"
    code, _, err = ask(capsys, *words.split())
    assert code == 2
    assert "keep_tokens and --match" in err


@pytest.mark.slow
def test_matched_modes_hold_the_same_bytes_found_on_one_prefill(tmp_path, capsys, monkeypatch):
    prefills, prefill = [], Engine.prefill
    monkeypatch.setattr(Engine, "prefill", lambda *a, **k: prefills.append(a) or prefill(*a, **k))
    words = (
        f"compare dense h2o streaming-llm naive-tok4 --model needle --ctx 512 --samples 1 "
        f"-T controls=off --match bytes=0.4 --expect h2o=fail --exit-zero --json --out {tmp_path}"
    )
    _, out, err = ask(capsys, *words.split())
    ratios = {cell["mode"]: cell["bytes"]["device_ratio"] for cell in json.loads(out)["cells"]}
    for mode in ("h2o", "streaming-llm"):
        assert abs(ratios[mode] / 0.4 - 1) <= 0.02, ratios
    assert "naive-tok4 at 512 has no budget to match" in err
    assert len(prefills) == 2  # one to find the budgets, one to answer
