import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from rcq_cli.errors import SpecError
from rcq_cli.executors.local import LocalExecutor
from rcq_cli.modes.recas import Options as RecasOptions
from rcq_cli.presets import Flags, resolve
from rcq_cli.progress import Silent
from rcq_cli.protocols import TaskRequest
from rcq_cli.store import RunReader
from rcq_cli.tasks._trace_policy import Selection, Values, _figures, measure, policy_of
from rcq_cli.tasks._traces import LENGTHS, STAGES, UNIT, Recipe, draw_trace
from rcq_cli.tasks.recas_traces import TASK, Options

RECIPE = Options().recipe()


def traces(count, recipe=RECIPE, first=100):
    return (draw_trace(index, 0, recipe) for index in range(first, first + count))


def mean(found, name):
    return float(np.mean([row[name] for row in found]))


@pytest.fixture(scope="module")
def by_policy():
    policies = {
        "recas": policy_of("recas", RecasOptions()),
        "gamma0": policy_of("recas", RecasOptions(gamma=0.0)),
        "topscore": policy_of("topscore", None),
        "streaming-llm": policy_of("streaming-llm", None),
        "dense": policy_of("dense", None),
    }
    return {name: [measure(trace, policy) for trace in traces(24)] for name, policy in policies.items()}


# -- the generator ------------------------------------------------------------------------------------------


def test_a_trace_depends_on_its_index_and_the_seed_alone():
    first, again, other = draw_trace(5, 0, RECIPE), draw_trace(5, 0, RECIPE), draw_trace(5, 1, RECIPE)
    assert np.array_equal(first.values, again.values)
    assert not np.array_equal(first.values, other.values)
    for a, b in zip(first.checkpoints, again.checkpoints, strict=True):
        assert np.array_equal(a.logits, b.logits)


def test_lengths_take_turns_and_stages_end_on_units_up_to_the_last_token():
    for index in range(8):
        trace = draw_trace(index, 0, RECIPE)
        ends = [checkpoint.tokens for checkpoint in trace.checkpoints]
        assert trace.length == LENGTHS[index % 4] == ends[-1]
        assert len(ends) == STAGES
        assert all(end % UNIT == 0 for end in ends)
        step = trace.length / STAGES
        assert all(abs(end - (i + 1) * step) <= step / 4 + UNIT for i, end in enumerate(ends))


def test_every_anchor_is_asked_for_once_after_two_stages_and_its_logit_is_lifted():
    quiet = Recipe(2.88, 3.4, 0.0, 8, 1.0, 0.0)
    for index in range(4):
        lifted = list(draw_trace(index, 0, Recipe(2.88, 3.4, 4.0, 8, 1.0, 0.0)).checkpoints)
        plain = list(draw_trace(index, 0, quiet).checkpoints)
        asked = [stage for stage, c in enumerate(lifted) for _ in c.asked]
        assert len(asked) == 8
        assert min(asked) >= 3
        for one, two in zip(lifted, plain, strict=True):
            difference = one.logits - two.logits
            assert difference[one.asked].ravel() == pytest.approx(4.0)
            assert np.count_nonzero(difference) == one.asked.size
            assert (one.asked < lifted[1].tokens).all()


def test_every_planted_unit_is_linked_when_its_stage_closes_and_none_without_links():
    for index in range(4):
        checkpoints = list(draw_trace(index, 0, Recipe(2.88, 3.4, 4.0, 8, 1.0, 0.0)).checkpoints)
        planted = {int(row[0]) // UNIT for c in checkpoints for row in c.asked}
        assert {int(u) for c in checkpoints[:2] for u in c.linked} == planted
        assert all(len(c.linked) == 0 for c in checkpoints[2:])
        assert all(int(u) * UNIT < checkpoints[0].tokens for u in checkpoints[0].linked)
        none = draw_trace(index, 0, Recipe(2.88, 3.4, 4.0, 8, 0.0, 0.0))
        assert sum(len(c.linked) for c in none.checkpoints) == 0


def test_false_links_hit_their_share_of_the_units():
    recipe = Recipe(2.88, 3.4, 4.0, 8, 0.0, 0.05)
    shares = [len(c.linked) / (c.tokens / UNIT) for t in traces(8, recipe) for c in t.checkpoints]
    assert np.mean(shares) == pytest.approx(0.05, abs=0.005)


# -- policies -----------------------------------------------------------------------------------------------


def test_full_utility_keeps_every_critical_token_at_the_published_shares(by_policy):
    found = by_policy["recas"]
    assert mean(found, "critical_recall") >= 0.99
    assert mean(found, "retained_ratio") <= 0.36
    assert mean(found, "mass_preserved") >= 0.985
    assert mean(found, "active_ratio") <= 0.293
    assert mean(found, "relative_error") <= 0.014
    assert mean(found, "cosine") >= 0.99998


@pytest.mark.parametrize("name", ["gamma0", "topscore"])
def test_without_stage_evidence_critical_tokens_are_lost(by_policy, name):
    assert 0.78 <= mean(by_policy[name], "critical_recall") <= 0.92


def test_dense_loses_nothing_and_recency_loses_nearly_everything(by_policy):
    for row in by_policy["dense"]:
        assert (row["critical_recall"], row["retained_ratio"], row["active_ratio"]) == (1.0, 1.0, 1.0)
        assert row["relative_error"] == pytest.approx(0.0, abs=1e-12)
        assert "bound_tightness" not in row
    assert mean(by_policy["streaming-llm"], "critical_recall") < 0.1


def test_no_bound_is_violated_under_any_policy(by_policy):
    assert sum(row["bound_violations"] for rows in by_policy.values() for row in rows) == 0


def test_links_that_are_never_made_cost_recall_in_proportion():
    policy = policy_of("recas", RecasOptions())
    half = [measure(t, policy) for t in traces(24, Recipe(2.88, 3.4, 4.0, 8, 0.5, 0.01))]
    none = [measure(t, policy) for t in traces(24, Recipe(2.88, 3.4, 4.0, 8, 0.0, 0.01))]
    lost, all_lost = 1 - mean(half, "critical_recall"), 1 - mean(none, "critical_recall")
    assert 0.25 * all_lost < lost < 0.75 * all_lost


def test_what_is_read_was_kept_and_what_was_evicted_never_returns():
    trace = draw_trace(100, 0, RECIPE)
    selection = Selection(policy_of("recas", RecasOptions()), trace.length)
    gone: set[int] = set()
    for checkpoint in trace.checkpoints:
        selection.admit(checkpoint)
        chosen = selection.select(checkpoint, torch.softmax(torch.from_numpy(checkpoint.logits), 0))
        kept, read = set(chosen.kept.tolist()), set(chosen.active.tolist())
        protected = {0, 1, 2, 3, *range(checkpoint.tokens - 128, checkpoint.tokens)}
        assert read <= kept
        assert protected <= read
        assert not kept & gone
        gone |= set(range(checkpoint.tokens)) - kept


def test_a_score_frozen_at_first_sight_never_changes():
    trace = draw_trace(100, 0, RECIPE)
    selection = Selection(policy_of("topscore", None), trace.length)
    before = None
    for checkpoint in trace.checkpoints:
        selection.admit(checkpoint)
        selection.select(checkpoint, torch.softmax(torch.from_numpy(checkpoint.logits), 0))
        if before is not None:
            assert torch.equal(selection.score[: len(before)], before)
        before = selection.score[: checkpoint.tokens].clone()


def test_a_wrong_mass_is_caught_as_a_violation(monkeypatch):
    values = Values(torch.tensor([[3.0], [-3.0]], dtype=torch.float64))
    chosen = SimpleNamespace(kept=torch.tensor([0]), active=torch.tensor([0]))
    honest = _figures(torch.tensor([0.5, 0.5], dtype=torch.float64), values, chosen)
    assert honest["bound_violations"] == 0
    assert honest["relative_error"] == float("inf")
    monkeypatch.setattr("rcq_cli.recas.dropped.widest_bound", lambda mass, _largest: 0.9 * mass)
    assert _figures(torch.tensor([0.5, 0.5], dtype=torch.float64), values, chosen)["bound_violations"] == 1


# -- the task -----------------------------------------------------------------------------------------------


def test_samples_do_not_depend_on_their_number_and_skip_the_fitted_traces():
    def metas(count):
        request = TaskRequest("", 0, count, 0, Options())
        return [s.meta for s in TASK.samples(request, None)]

    assert metas(5) == metas(50)[:5]
    assert metas(1)[0]["trace"] == 100


def test_an_answer_is_scored_from_its_stored_text():
    sample = next(TASK.samples(TaskRequest("", 0, 1, 0, Options()), None))
    mode = SimpleNamespace(name="recas")
    completion = TASK.answer(sample, Options(), mode, RecasOptions())
    assert TASK.score(sample, completion) == json.loads(completion.text)
    assert TASK.score(sample, completion)["critical_recall"] == 1.0


@pytest.mark.parametrize("option", [{"pl": 1.5}, {"anchors": 0}, {"false_links": -0.1}, {"spread": -1.0}])
def test_options_out_of_range_are_refused(option):
    with pytest.raises(SpecError, match="not allowed"):
        Options(**option)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"modes": ("recas",), "model": "needle"}, "uses no model"),
        ({"modes": ("recas",), "ctx": ("8k",)}, "uses no model"),
        ({"modes": ("certified",)}, "recas, recas-certified, topscore, h2o, streaming-llm, dense"),
    ],
)
def test_a_model_a_context_and_a_mode_without_selection_are_usage_errors(tmp_path, flags, said):
    with pytest.raises(SpecError, match=said) as caught:
        resolve("eval", Flags(tasks=("recas-traces",), **flags), folder=tmp_path)
    assert caught.value.exit_code == 2


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("runs")
    flags = Flags(tasks=("recas-traces",), modes=("recas",), samples=4, task_options=("latency=off",))
    plan = resolve("eval", flags, folder=out)
    (folder,) = LocalExecutor().run(plan.batches, out=out, resume=False, progress=Silent())
    return folder, plan


def test_a_run_gives_one_cell_without_context_and_the_named_metrics(run_folder):
    (cell,) = RunReader(run_folder[0]).cells()
    assert (cell["task"], cell["ctx"], cell["n"], cell["model"]) == ("recas-traces", None, 4, "none")
    assert (cell["metric"], cell["score"], cell["status"]) == ("critical_recall", 1.0, "complete")
    names = {
        "critical_recall",
        "retained_ratio",
        "mass_preserved",
        "active_ratio",
        "relative_error",
        "cosine",
    }
    assert names <= set(cell["metrics"])
    assert cell["metrics"]["bound_violations"] == 0
    assert (cell["bytes"], cell["certificates"]) == (None, None)
    assert (cell["bytes_status"], cell["certificates_status"]) == ("not_applicable", "not_applicable")
    # nothing was prefilled or decoded: null and why, never 0
    assert (cell["prompt_tokens_median"], cell["prompt_tokens_median_status"]) == (None, "not_applicable")
    assert (cell["selection_ms_p50"], cell["selection_ms_p50_status"]) == (None, "not_measured")


def test_two_runs_agree_in_every_row(run_folder, tmp_path):
    (again,) = LocalExecutor().run(run_folder[1].batches, out=tmp_path, resume=False, progress=Silent())
    first = (run_folder[0] / "examples.jsonl").read_bytes()
    assert first == (again / "examples.jsonl").read_bytes()
    assert (run_folder[0] / "summary.json").read_bytes() == (again / "summary.json").read_bytes()


def test_a_broken_bound_fails_the_run_with_code_four(tmp_path, monkeypatch):
    monkeypatch.setattr("rcq_cli.recas.dropped.widest_bound", lambda mass, _largest: 1e-9 * mass)
    flags = Flags(tasks=("recas-traces",), modes=("recas",), samples=1, task_options=("latency=off",))
    plan = resolve("eval", flags, folder=tmp_path)
    (folder,) = LocalExecutor().run(plan.batches, out=tmp_path, resume=False, progress=Silent())
    summary = RunReader(folder).summary
    assert [(p["code"], p["kind"], p["count"]) for p in summary["problems"]] == [(4, "violation", 7)]
    assert summary["cells"][0]["metrics"]["bound_violations"] == 7
