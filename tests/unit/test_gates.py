"""Exit codes, default gates and `--fail-on` expressions."""

import itertools
import json

import pytest

from rcq_cli.errors import SpecError
from rcq_cli.gates import (
    check_expectations,
    check_gates,
    evaluate_gates,
    exit_code,
    parse_expectations,
    parse_gate,
)
from rcq_cli.judge import judge
from rcq_cli.pairing import PairSpec

PRECEDENCE = (130, 1, 2, 7, 5, 4, 6, 3, 0)


def rows(values, arm, metric="accuracy"):
    return [
        {
            "sample_id": f"t/{i:04d}",
            "prompt_ids_sha256": f"prompt {i}",
            "max_new_tokens": 48,
            "stop_ids": [1],
            "seed": i,
            "cluster": str(i % 10),
            "status": "ok",
            "scores": {metric: float(value)},
            "text": f"{arm} {i}",
            "finish_reason": "eos",
            "engaged": {"engaged": True, "reason": ""},
            "first_logits_sha256": arm,
        }
        for i, value in enumerate(values)
    ]


def entry(candidate="certified", lost=0, *, task="niah", ctx=8192, n=110, won=0):
    """One cell of `judge`: the candidate loses `lost` of the samples that the reference gets right."""
    spec = PairSpec(task=task, ctx=ctx, reference="dense", candidate=candidate, margin=0.05, cluster="form")
    return (
        spec,
        rows([0] * won + [1] * (n - won), "dense"),
        rows([1] * won + [0] * lost + [1] * (n - won - lost), candidate),
    )


def cell(mode="certified", violations=0, **changes):
    certificates = None if mode == "dense" else {"violations": violations, "audited": 1000}
    base = {"task": "niah", "ctx": 8192, "mode": mode, "status": "complete", "certificates": certificates}
    return base | {"metrics": {}} | changes


def report(*entries, cells=(), **options):
    return evaluate_gates(judge(entries), list(cells), **options)


@pytest.mark.parametrize("causes", list(itertools.combinations(PRECEDENCE, 2)))
def test_the_earlier_code_of_the_printed_order_wins(causes):
    assert exit_code(causes) == exit_code(reversed(causes)) == causes[0]


@pytest.mark.parametrize("code", PRECEDENCE)
def test_exit_zero_forgives_a_failed_gate_and_nothing_else(code):
    assert exit_code([code], exit_zero=True) == (0 if code == 3 else code)
    assert exit_code([code, 3], exit_zero=True) == (0 if code in (0, 3) else code)


def test_nothing_and_everything():
    assert exit_code([]) == 0
    assert exit_code(PRECEDENCE) == 130


# -- default gates ------------------------------------------------------------------------------------------


def test_a_pass_passes_and_the_object_is_json():
    found = report(entry(), cells=[cell("dense"), cell()])
    assert found.exit_code() == 0
    shape = found.to_json()
    assert shape["passed"] is True
    assert shape["failures"] == []
    assert {"expr", "matched", "value", "status", "code"} <= set(shape["gates"][0])
    assert json.loads(json.dumps(shape, allow_nan=False)) == shape


def test_a_failed_verdict_is_3_and_says_which_cell_and_why():
    found = report(entry("kivi", 40))
    assert found.exit_code() == 3
    assert found.exit_code(exit_zero=True) == 0
    assert found.failures == ["niah@8192 kivi: difference -0.3636 is below -0.05"]
    assert found.to_json()["passed"] is False


def test_an_inconclusive_cell_warns_and_fails_only_when_strict():
    found = report(entry(lost=3))
    assert (found.exit_code(), len(found.warnings)) == (0, 1)
    assert report(entry(lost=3), strict=True).exit_code() == 3


def test_naive_is_expected_to_fail_and_does_not_fail_the_comparison():
    found = report(entry("naive", 40), entry("certified"))
    assert (found.exit_code(), found.warnings) == (0, [])
    assert "expected" in {gate.status for gate in found.gates}
    # and neither does a naive whose loss is not decided, also when strict
    assert report(entry("naive", 3), entry("certified"), strict=True).exit_code() == 0


def test_a_certified_that_fails_beside_naive_fails_the_comparison():
    assert report(entry("naive", 40), entry("certified", 40)).exit_code() == 3


def test_a_naive_that_survives_makes_the_harness_insensitive():
    found = report(entry("naive"), entry("certified"))
    assert found.exit_code() == 0
    assert any("harness not sensitive" in text for text in found.warnings)
    assert report(entry("naive"), strict=True).exit_code() == 3
    # one cell in which it falls is enough
    mixed = report(entry("naive"), entry("naive", 40, ctx=65536), strict=True)
    assert mixed.exit_code() == 0


def test_expectations_can_be_named_and_lifted():
    assert parse_expectations([]) == {"naive": "fail"}
    expected = parse_expectations(["kivi=fail", "naive=pass"])
    assert report(entry("kivi", 40), expected=expected).exit_code() == 0
    assert report(entry("naive", 40), expected=expected).exit_code() == 3
    assert report(entry("naive:group=32", 40)).exit_code() == 0
    for wrong in ("kivi", "=fail", "kivi=lose"):
        with pytest.raises(SpecError):
            parse_expectations([wrong])


def test_an_expectation_of_what_is_not_compared_is_refused_with_the_nearest_name():
    arms = ("naive:group=32", "kivi")
    for known in ("naive=fail", "naive:group=32=pass", "kivi=fail"):
        check_expectations(parse_expectations([known]), arms)
    for wrong, nearest in (("naiv", "naive"), ("kiwi", "kivi"), ("kivi:group=32", "naive:group=32")):
        with pytest.raises(SpecError, match=f"no mode '{wrong}' .* did you mean '{nearest}'"):
            check_expectations(parse_expectations([f"{wrong}=fail"]), arms)
    # what rcq expects by itself may be lifted in every comparison
    check_expectations(parse_expectations(["naive=pass"]), ("certified",))


def test_violations_are_4_also_in_an_arm_that_may_fail():
    for mode in ("certified", "naive"):
        found = report(entry(mode, 40), cells=[cell(mode, violations=3)])
        assert found.exit_code() == 4
        assert found.failures[0] == (f"niah@8192 {mode}: 3 certificate violations in 1000 audited head-steps")


def test_a_violation_is_not_hidden_by_an_incomplete_run():
    spec, reference, candidate = entry()
    found = report((spec, reference, candidate[1:]), cells=[cell(violations=1)])
    assert {gate.code for gate in found.gates} >= {4, 6}
    assert found.exit_code() == 4


def test_incomplete_pairs_are_6():
    spec, reference, candidate = entry()
    assert report((spec, reference, candidate[1:])).exit_code() == 6
    failed = [candidate[0] | {"status": "nan", "scores": None}, *candidate[1:]]
    assert report((spec, reference, failed)).exit_code() == 6
    idle = [candidate[0] | {"engaged": {"engaged": False, "reason": "inactive"}}, *candidate[1:]]
    assert report((spec, reference, idle)).exit_code() == 6


def test_other_prompts_are_5():
    spec, reference, candidate = entry()
    assert report((spec, reference, [r | {"prompt_ids_sha256": "x"} for r in candidate])).exit_code() == 5


@pytest.mark.parametrize("status", ["started", "interrupted"])
def test_an_unfinished_run_is_6_unless_partial(status):
    cells = [cell("dense"), cell(status=status)]
    assert report(entry(), cells=cells).exit_code() == 6
    assert report(entry(), cells=cells, partial=True).exit_code() == 0


def problem(kind, code=6, count=1, **place):
    run = {"task": "niah", "ctx": 8192, "mode": "dense"} | place
    return run | {"kind": kind, "code": code, "what": f"{kind} happened", "count": count}


def test_problems_of_runs_count_and_are_told_once():
    assert report(entry(), problems=[problem("control_no_needle")]).exit_code() == 6
    spec, reference, candidate = entry()
    failed = [candidate[0] | {"status": "oom", "scores": None}, *candidate[1:]]
    found = report((spec, reference, failed), problems=[problem("sample_errors", mode="certified")])
    assert len([gate for gate in found.gates if gate.code == 6]) == 1
    twice = report(
        entry(), cells=[cell(violations=2)], problems=[problem("violation", 4, 2, mode="certified")]
    )
    assert len([gate for gate in twice.gates if gate.code == 4]) == 1


def test_allowed_errors_and_allowed_idleness_are_no_problem():
    errors = [problem("sample_errors", count=2)]
    assert report(entry(), problems=errors, max_errors=2).exit_code() == 0
    assert report(entry(), problems=errors, max_errors=1).exit_code() == 6
    idle = [problem("inactive", count=9)]
    assert report(entry(), problems=idle, allow_inactive=True).exit_code() == 0
    assert report(entry(), problems=idle).exit_code() == 6


def test_answers_that_were_cut_off_warn_and_fail_a_release():
    spec, reference, candidate = entry(n=550, lost=60)
    cut = [r | {"finish_reason": "length"} for r in candidate]
    lenient = evaluate_gates(judge([(spec, reference, cut)]), [], preset="ci")
    assert any("60 of 550 answers were cut off" in text for text in lenient.warnings)
    doomed = evaluate_gates(judge([(spec, reference, cut)]), [], expected={"certified": "fail"})
    assert not any("cut off" in text for text in doomed.warnings)
    found = report((spec, reference, cut), preset="release")
    assert any("cut off" in text for text in found.failures)


def test_kl_above_its_limit_warns():
    cells = [cell("dense"), cell(metrics={"kl_mean": 0.03})]
    assert any("KL" in text for text in report(entry(), cells=cells, preset="ci").warnings)
    assert report(entry(), cells=cells).warnings == []


def test_an_improvement_never_fails_and_is_noticed():
    found = report(entry(won=20))
    assert found.exit_code() == 0
    assert found.to_json()["notices"] == [
        "niah@8192 certified: better than the reference; refresh the baseline"
    ]


# -- expressions --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("niah@8k.accuracy.difference < -0.3", 3),
        ("niah@8192.accuracy.difference < -0.5", 0),
        ("niah.accuracy.upper < -0.02", 3),
        ("*.critical.candidate > 3", 3),
        ("*@*.critical.candidate > 40", 0),
        ("niah@8k.accuracy.candidate <= 0.6363637", 3),
        ("niah@8k.accuracy.reference >= 1", 3),
        ("niah@8k.accuracy.reference != 1", 0),
        ("niah.accuracy.verdict == FAIL", 3),
        ("niah.accuracy.verdict != fail", 0),
        ("niah.accuracy.n < 110", 0),
        ("niah.accuracy.n == 110", 3),
        ("niah.accuracy.ratio<0.7", 3),
        ("niah.flip_rate.candidate > 0.3", 3),
    ],
)
def test_an_expression_names_the_condition_that_fails(text, code):
    found = report(entry("naive", 40), fail_on=[parse_gate(text)])
    assert found.exit_code() == code
    gate = found.gates[-1]
    assert (gate.expr, gate.matched, gate.status) == (text, "niah@8192 naive", "fail" if code else "pass")


def test_a_wildcard_meets_every_cell():
    found = report(
        entry(ctx=1024), entry(ctx=4096, task="other"), fail_on=[parse_gate("*.critical.candidate > 3")]
    )
    assert [gate.matched for gate in found.gates[-2:]] == ["niah@1024 certified", "other@4096 certified"]


def test_a_task_without_its_part_means_every_part_and_macro_the_mean():
    entries = [entry(task="ruler/vt"), entry(task="ruler/cwe", lost=40)]
    by_part = report(*entries, fail_on=[parse_gate("ruler.accuracy.difference < -0.3")])
    assert [g.status for g in by_part.gates[-2:]] == ["pass", "fail"]
    macro = report(*entries, fail_on=[parse_gate("ruler.macro.verdict == FAIL")])
    assert macro.gates[-1].matched == "ruler@8192 certified"
    assert macro.gates[-1].status == "fail"


def test_perplexity_gates_speak_of_ratios():
    spec = PairSpec(
        task="ppl", ctx=8192, reference="dense", candidate="kivi", margin=0.02, metric="perplexity"
    )
    arms = [rows([value] * 20, arm, "perplexity") for arm, value in (("dense", 10.0), ("kivi", 10.05))]
    found = report((spec, *arms), fail_on=[parse_gate("ppl.perplexity.upper > 1.01")])
    assert found.gates[-1].value == pytest.approx(1.005)
    assert found.exit_code() == 0


def test_device_bytes_are_gated_as_the_tables_show_them_or_over_the_reference():
    pairs = [pair | {"device_bytes_ratio": 0.27} for pair in judge([entry()])]
    place = {name: pairs[0][name] for name in ("task", "ctx")}
    cells = [place | {"mode": pairs[0]["candidate"], "bytes": {"device_ratio": 0.54}}]
    gates = [parse_gate(f"profile.device_bytes.{name} > 0.45") for name in ("share", "ratio")]
    found = evaluate_gates(pairs, cells, fail_on=gates).gates[-2:]
    assert [(gate.value, gate.status) for gate in found] == [(0.54, "fail"), (0.27, "pass")]
    with pytest.raises(SpecError, match="accuracy has no share"):
        parse_gate("niah.accuracy.share > 0.45")


def test_cost_gates_read_the_ratio_and_refuse_times_that_cannot_be_compared():
    pairs = [pair | {"latency_ratio": 1.3, "device_bytes_ratio": 0.4} for pair in judge([entry()])]
    gates = [parse_gate(text) for text in ("profile.decode_ms.ratio > 1.25", "*.device_bytes.ratio > 0.5")]
    found = evaluate_gates(pairs, [], fail_on=gates)
    assert [gate.status for gate in found.gates[-2:]] == ["fail", "pass"]
    other = [p | {"latency_ratio": None, "latency_status": "timing_contract_differs"} for p in pairs]
    refused = evaluate_gates(other, [], fail_on=gates[:1])
    assert (refused.gates[-1].status, refused.exit_code()) == ("not evaluated", 5)
    absent = evaluate_gates(pairs, [], fail_on=[parse_gate("profile.decode_ms.upper > 1.25")])
    assert absent.exit_code() == 6


def test_further_metrics_come_from_the_cells():
    cells = [cell("dense", metrics={"contains": 1.0}), cell(metrics={"contains": 0.8})]
    found = report(entry(), cells=cells, fail_on=[parse_gate("niah.contains.difference < -0.1")])
    assert found.gates[-1].value == pytest.approx(-0.2)
    assert found.exit_code() == 3


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("naih@8k.accuracy.upper < 0", "'niah'"),
        ("niah@8k.acuracy.upper < 0", "'accuracy'"),
        ("niah@8k.accuracy.uper < 0", "'upper'"),
        ("niah@8k.accuracy.verdict == FAIL!", "'FAIL'"),
        ("niah@64k.accuracy.upper < 0", "never evaluated"),
        ("niah.macro.verdict == FAIL", "never evaluated"),
    ],
)
def test_a_gate_that_speaks_of_nothing_is_a_usage_error(text, hint):
    with pytest.raises(SpecError, match=hint) as caught:
        report(entry(), fail_on=[parse_gate(text)])
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    "text",
    [
        "",
        "niah",
        "niah.accuracy < 0",
        "niah@8k.accuracy.upper",
        "niah@8k.accuracy.upper = 0",
        "niah@8k.accuracy.upper < zero",
        "niah@8k.accuracy.upper < nan",
        "niah@8k.accuracy.upper < inf",
        "niah@8k.accuracy.verdict < FAIL",
        "niah@8q.accuracy.upper < 0",
        "niah.critical.upper > 3",
        "niah.decode_ms.candidate > 3",
        "niah@8k.accuracy.upper < 0 or more",
    ],
)
def test_a_malformed_gate_is_a_usage_error(text):
    with pytest.raises(SpecError):
        parse_gate(text)


def test_gates_are_checked_before_anything_runs():
    cells = [("niah", 1024), ("ruler/vt", 4096)]
    good = (
        "niah@1k.accuracy.upper < 0",
        "ruler.macro.lower < 0",
        "ruler/vt.critical.candidate > 3",
        "*.accuracy.n < 9",
    )
    check_gates([parse_gate(text) for text in good], cells, ["accuracy"])
    for text in ("niah@4k.accuracy.upper < 0", "ruler/cwe.accuracy.n < 9", "niah.f1.n < 9"):
        with pytest.raises(SpecError):
            check_gates([parse_gate(text)], cells, ["accuracy"])
