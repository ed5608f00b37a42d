"""Published tables and constructed rows through the whole judgement: pairing, intervals, verdicts."""

import json
import math
import random

import pytest

from rcq_cli.errors import SpecError
from rcq_cli.judge import add_costs, finish_pairs, judge, judge_cell
from rcq_cli.noise import noise_floor
from rcq_cli.pairing import PairSpec

SECTION_13 = {
    *("task", "ctx", "reference", "candidate", "n", "n_planned", "both", "reference_only", "candidate_only"),
    *("neither", "reference_score", "candidate_score", "difference", "difference_ci", "ci_method", "cluster"),
    *("mcnemar_p", "mcnemar_p_holm", "flip_rate", "text_identical", "critical", "mde", "margin", "alpha"),
    *("verdict", "labels", "reasons"),
}


def spec(**changes):
    base = {"task": "niah", "ctx": 8192, "reference": "dense", "candidate": "certified", "margin": 0.05}
    return PairSpec(**(base | {"cluster": "form"} | changes))


def row(i, value, arm, cluster, metric="accuracy", **changes):
    return {
        "sample_id": f"niah//8192/{i:04d}",
        "prompt_ids_sha256": f"prompt {i}",
        "max_new_tokens": 48,
        "stop_ids": [1],
        "seed": i,
        "cluster": str(cluster),
        "status": "ok",
        "scores": {metric: float(value)},
        "text": f"{arm} {i}",
        "output_ids": [i],
        "finish_reason": "eos",
        "engaged": {"engaged": True, "reason": ""},
        "first_logits_sha256": arm,
    } | changes


def arms(reference, candidate, clusters=None, **changes):
    """Rows of both arms from their scores; without `clusters` each sample is one by itself."""
    clusters = clusters or range(len(reference))
    return tuple(
        [row(i, v, arm, k, **changes) for i, (v, k) in enumerate(zip(values, clusters, strict=True))]
        for arm, values in (("dense", reference), ("cand", candidate))
    )


def table(a, b, c, d):
    return arms([1] * (a + b) + [0] * (c + d), [1] * a + [0] * b + [1] * c + [0] * d)


def by_needle(right, b, c):
    """Ten samples per needle, `right` of them dense, of which the candidate loses b and gains c elsewhere."""
    reference, candidate, clusters = [], [], []
    for needle, (good, lost, won) in enumerate(zip(right, b, c, strict=True)):
        reference += [1] * good + [0] * (10 - good)
        candidate += [0] * lost + [1] * (good - lost) + [1] * won + [0] * (10 - good - won)
        clusters += [needle] * 10
    return arms(reference, candidate, clusters)


DENSE_8K = (10, 9, 4, 2, 6, 1, 0, 0, 7, 0)
CERTIFIED_8K = ((3, 5, 1, 1, 3, 0, 0, 0, 3, 0), (0, 1, 5, 2, 2, 0, 1, 2, 2, 1))
NAIVE_8K = ((2, 9, 4, 2, 6, 1, 0, 0, 7, 0), (0,) * 10)


def test_a_pair_has_every_field_of_the_contract_and_is_json():
    pair = judge_cell(spec(), *table(23, 16, 16, 45))
    assert set(pair) >= SECTION_13
    assert json.loads(json.dumps(pair, allow_nan=False)) == pair


def test_published_certified_cell_clustered_by_needle():
    pair = judge_cell(spec(), *by_needle(DENSE_8K, *CERTIFIED_8K))
    counts = ("both", "reference_only", "candidate_only", "neither")
    assert [pair[k] for k in counts] == [23, 16, 16, 45]
    assert pair["cluster"]["ci"] == pytest.approx([-0.16861, 0.16861], abs=5.1e-6)
    assert pair["difference_ci"] == pytest.approx([-0.16861, 0.16861], abs=5.1e-6)
    assert pair["cluster"]["sign_flip_p"] == 1
    assert (pair["cluster"]["k"], pair["ci_method"]) == (10, "tango+cluster-t")
    assert (pair["mcnemar_p"], pair["flip_rate"], pair["critical"]) == (1, 0.32, 16)
    assert pair["verdict"] == "inconclusive"


def test_published_naive_cell_fails_with_clusters_and_without():
    clustered = judge_cell(spec(), *by_needle(DENSE_8K, *NAIVE_8K))
    alone = judge_cell(spec(cluster="none"), *by_needle(DENSE_8K, *NAIVE_8K))
    assert clustered["difference_ci"] == pytest.approx([-0.54229, -0.07771], abs=5.1e-6)
    assert alone["difference_ci"] == pytest.approx([-0.40626, -0.22780], abs=5.1e-6)
    assert alone["cluster"] == {"key": "none", "k": 100, "ci": None, "sign_flip_p": None}
    assert clustered["verdict"] == alone["verdict"] == "fail"
    assert alone["reasons"] == ["difference -0.31 is below -0.05"]
    assert alone["mcnemar_p"] == pytest.approx(9.3132257e-10, rel=1e-7)


@pytest.mark.parametrize(
    ("cells", "margin", "verdict"),
    [
        ((23, 16, 16, 45), 0.02, "inconclusive"),
        ((46, 5, 3, 46), 0.05, "inconclusive"),
        ((64, 2, 2, 32), 0.05, "inconclusive"),
        ((7, 44, 3, 46), 0.05, "fail"),
        ((5, 61, 0, 34), 0.05, "fail"),
        ((8, 31, 0, 61), 0.02, "fail"),
        ((188, 0, 0, 0), 0.02, "inconclusive"),
        ((189, 0, 0, 0), 0.02, "pass"),
        ((100, 1, 0, 9), 0.05, "pass"),
        ((97, 2, 2, 9), 0.05, "pass"),
        ((97, 3, 3, 7), 0.05, "inconclusive"),
        ((97, 2, 0, 11), 0.05, "inconclusive"),
        # the smoke preset: 22 samples at .15
        ((22, 0, 0, 0), 0.15, "pass"),
        ((20, 0, 1, 1), 0.15, "pass"),
        ((19, 0, 2, 1), 0.15, "pass"),
        ((18, 1, 2, 1), 0.15, "pass"),
        ((17, 1, 3, 1), 0.15, "pass"),
        ((19, 1, 1, 1), 0.15, "inconclusive"),
    ],
)
def test_verdicts_of_the_printed_tables(cells, margin, verdict):
    assert judge_cell(spec(margin=margin), *table(*cells))["verdict"] == verdict


def test_the_published_64k_cell_passes_only_at_another_alpha():
    assert judge_cell(spec(alpha=0.05), *table(64, 2, 2, 32))["verdict"] == "pass"


def test_a_perfect_smoke_cell_of_22_passes_in_ten_needle_forms():
    forms = [i % 10 for i in range(22)]
    pair = judge_cell(spec(margin=0.15, n_planned=22), *arms([1] * 22, [1] * 22, forms))
    assert (pair["verdict"], pair["reasons"], pair["cluster"]["k"]) == ("pass", [], 10)


def test_a_perfect_cell_below_n0_is_uninformative_and_says_the_size_that_decides():
    pair = judge_cell(spec(margin=0.15), *arms([1] * 21, [1] * 21, [i % 10 for i in range(21)]))
    assert pair["verdict"] == "inconclusive"
    assert "uninformative" in pair["labels"]
    assert any("22 are needed" in reason for reason in pair["reasons"])


def test_a_collapse_is_decided_with_22_samples_and_two_cells():
    forms = [i % 10 for i in range(22)]
    rows = arms([1] * 22, [0] * 8 + [1] * 14, forms)
    pairs = judge([(spec(ctx=ctx, candidate="naive", margin=0.15), *rows) for ctx in (1024, 4096)])
    assert [pair["verdict"] for pair in pairs] == ["fail", "fail"]
    assert pairs[0]["mcnemar_p_holm"] == pytest.approx(2 / 128)


def test_a_reference_that_knows_nothing_is_uninformative():
    pair = judge_cell(spec(), *table(0, 0, 0, 5))
    assert pair["verdict"] == "inconclusive"
    assert "uninformative" in pair["labels"]
    # even a certain loss of the little that is there decides nothing
    lost = judge_cell(spec(), *table(0, 150, 0, 850))
    assert lost["difference_ci"][1] < -0.05
    assert lost["verdict"] == "inconclusive"


def test_fewer_than_five_clusters_cannot_pass_unless_clusters_are_switched_off():
    rows = arms([1] * 200, [1] * 200, [i % 4 for i in range(200)])
    pair = judge_cell(spec(), *rows)
    assert pair["verdict"] == "inconclusive"
    assert "too few clusters" in pair["labels"]
    assert any("too few clusters: 4" in reason for reason in pair["reasons"])
    assert judge_cell(spec(cluster="none"), *rows)["verdict"] == "pass"


def test_one_cluster_can_fail():
    pair = judge_cell(spec(), *arms([1] * 60, [0] * 60, [0] * 60))
    assert (pair["verdict"], pair["cluster"]["ci"]) == ("fail", None)


def test_a_sure_loss_of_the_margin_fails_by_the_second_clause():
    # nine of nine flips lost on 100: -.09, upper end above -.05
    pair = judge_cell(spec(), *table(80, 9, 0, 11))
    assert pair["difference_ci"][1] > -0.05
    assert pair["verdict"] == "fail"
    # among twenty such cells p is no longer below .05 (20 * .00390625)
    family = finish_pairs([pair | {"ctx": i} for i in range(20)])
    assert {p["p_holm"] for p in family} == {20 * 2 / 512}
    assert {p["verdict"] for p in family} == {"inconclusive"}


def test_no_interval_of_a_difference_leaves_what_is_possible():
    """Two questions on each of eight contexts, 14 of 16 answers lost: the cluster interval goes below -1."""
    candidate = [0] * 12 + [0, 1, 1, 0]
    pair = judge_cell(spec(), *arms([1] * 16, candidate, [f"context-{i // 2}" for i in range(16)]))
    assert pair["ci_method"] == "tango+cluster-t"
    assert pair["cluster"]["ci"][0] < -1
    assert pair["difference_ci"][0] == -1
    assert pair["difference_ci"][1] < 0
    fractional = judge_cell(spec(), *arms([1.0] * 3, [0.0, 0.25, 0.0]))
    assert fractional["difference_ci"][0] == -1


def test_holm_counts_the_cells_of_each_candidate_alone():
    cells = [(31, 0), (44, 3), (61, 0)]
    naive = [(spec(candidate="naive", ctx=i), *table(0, b, c, 100 - b - c)) for i, (b, c) in enumerate(cells)]
    other = [(spec(candidate="kivi"), *table(60, 6, 0, 34))]
    pairs = judge(naive + other)
    expected = [9.3132257e-10, 4.9294613e-10, 2.6020852e-18, 0.03125]
    assert [p["mcnemar_p_holm"] for p in pairs] == pytest.approx(expected, rel=1e-7)
    assert [p["holm_family"] for p in pairs] == [3, 3, 3, 1]


def test_a_loss_that_only_holm_leaves_in_doubt_says_so():
    cells = [(spec(candidate="naive", ctx=i, margin=0.15), *table(16, 6, 0, 0)) for i in range(2)]
    alone, both = judge(cells[:1])[0], judge(cells)[0]
    assert (alone["verdict"], both["verdict"]) == ("fail", "inconclusive")
    assert "p = 0.0625, adjusted for 2 cells (Holm), is not below 0.05" in both["reasons"][-1]


def test_labels_of_direction():
    worse = judge_cell(spec(margin=0.10), *table(480, 15, 0, 5))
    assert (worse["verdict"], worse["labels"]) == ("pass", ["worse but within margin"])
    assert "better" in judge_cell(spec(), *table(70, 5, 15, 10))["labels"]


def test_five_discordant_pairs_are_called_underpowered_and_six_are_not():
    assert "underpowered (m<6)" in judge_cell(spec(), *table(80, 5, 0, 15))["labels"]
    assert "underpowered (m<6)" not in judge_cell(spec(), *table(80, 6, 0, 14))["labels"]


def test_mid_p_has_names_of_its_own_and_is_what_holm_adjusts():
    # printed mid-p: (6, 0) .015625, (1, 7) .0390625; Holm of two: .03125 and .0390625
    cells = [(spec(ctx=b, mid_p=True), *table(60, b, c, 40 - b - c)) for b, c in ((6, 0), (1, 7))]
    pairs = judge(cells)
    assert [p["mcnemar_mid_p"] for p in pairs] == [p["p_value"] for p in pairs] == [0.015625, 0.0390625]
    assert [p["mcnemar_mid_p_holm"] for p in pairs] == [0.03125, 0.0390625]
    assert [p["mcnemar_p"] for p in pairs] == [0.03125, 0.0703125]
    assert {p["mcnemar_p_holm"] for p in pairs} == {None}
    assert {p["p_method"] for p in pairs} == {"mcnemar mid-p"}


def test_four_discordant_pairs_are_underpowered_by_mid_p_and_five_are_not():
    assert "underpowered (m<5)" in judge_cell(spec(mid_p=True), *table(80, 4, 0, 16))["labels"]
    assert judge_cell(spec(mid_p=True, margin=0.1), *table(80, 5, 0, 15))["labels"] == []


def test_macro_of_binary_parts_by_mid_p():
    parts = [
        (spec(task=f"ruler/{name}", mid_p=True), *table(30, b, c, 10))
        for name, b, c in (("a", 6, 1), ("b", 4, 1))
    ]
    macro = judge(parts)[-1]
    assert macro["p_value"] == macro["mcnemar_mid_p_holm"] == pytest.approx(0.0224609375, rel=1e-8)
    assert macro["p_method"] == "stratified mcnemar mid-p"


def test_the_size_that_decides_a_loss_is_that_of_the_test_in_use():
    # 4 of 4 flips lost on 22 samples at .15: by mid-p five of five decide, exactly six of six
    sizes = []
    for mid_p in (False, True):
        reason = judge_cell(spec(margin=0.15, mid_p=mid_p), *table(16, 4, 0, 2))["reasons"][0]
        sizes.append(int(reason.split("about ")[1].split()[0]))
    assert [round(4 / 22 * size) for size in sizes] == [6, 5]


def test_an_identity_arm_has_no_flips_and_passes_from_n0_on():
    dense = [1] * 60 + [0] * 13
    rows, again = arms(dense, dense)
    same = [other | {"text": one["text"]} for one, other in zip(rows, again, strict=True)]
    pair = judge_cell(spec(exact_candidate=True), rows, same)
    assert (pair["difference"], pair["flip_rate"], pair["text_identical"], pair["verdict"]) == (
        0,
        0,
        73,
        "pass",
    )


def test_an_inconclusive_cell_names_a_size_that_would_decide():
    pair = judge_cell(spec(), *table(64, 2, 2, 32))
    size = int(pair["reasons"][0].split("about ")[1].split()[0])
    assert 100 < size < 120
    recommended = judge_cell(spec(margin=0.02), *table(23, 16, 16, 45))["reasons"][0]
    assert "fix the task" in recommended


@pytest.mark.parametrize(
    ("cells", "margin", "size"),
    [
        # without a flip: n0 of statistics.md section 7
        ((2, 0, 0, 0), 0.15, 22),
        ((2, 0, 0, 0), 0.05, 73),
        ((5, 0, 0, 0), 0.02, 189),
        ((5, 0, 0, 0), 0.01, 381),
    ],
)
def test_few_samples_do_not_make_the_size_that_decides_unaffordable(cells, margin, size):
    reasons = judge_cell(spec(margin=margin), *table(*cells))["reasons"]
    assert any(f"about {size} samples like these would decide" in reason for reason in reasons)
    assert not any("affordable" in reason for reason in reasons)


@pytest.mark.parametrize("times", [1, 10])
def test_whether_a_size_is_affordable_does_not_depend_on_how_many_samples_were_run(times):
    # z^2 * flip rate / margin^2 = 3073 is more than twice a release
    reasons = judge_cell(spec(margin=0.02), *table(*(times * count for count in (23, 16, 16, 45))))["reasons"]
    assert any("no affordable n decides at a flip rate of 0.32" in reason for reason in reasons)


def test_mde_uses_the_observed_gains():
    assert judge_cell(spec(), *table(105, 0, 0, 5))["mde"] == pytest.approx(0.071, abs=0.00055)
    assert judge_cell(spec(), *table(90, 2, 1, 7))["mde"] == pytest.approx(0.096, abs=0.00055)


# -- fractional scores and perplexity -----------------------------------------------------------------------


def test_fractional_scores_use_the_printed_t_interval():
    d = [-0.5, -0.25, 0, 0.25, -0.5, -0.25, -0.125, 0, -0.25, 0.125]
    reference = [0.75] * 10
    pair = judge_cell(
        spec(task="ruler/vt"), *arms(reference, [r + x for r, x in zip(reference, d, strict=True)])
    )
    assert pair["difference"] == pytest.approx(-0.15)
    # the guard of ten samples, z^2 / (10 + z^2), is wider than the t interval at either end
    half = 3.841458821 / 13.841458821
    assert pair["difference_ci"] == pytest.approx([-0.15 - half, -0.15 + half], abs=1e-9)
    assert (pair["p_value"], pair["p_method"]) == (0.125, "sign-flip")
    assert pair["both"] is pair["mcnemar_p"] is pair["mcnemar_p_holm"] is None
    assert pair["ci_method"] == "t"


def test_fractional_scores_without_spread_are_not_certain():
    pair = judge_cell(spec(), *arms([0.5] * 100, [0.5] * 100))
    assert pair["difference_ci"] == pytest.approx([-0.03699, 0.03699], abs=5.1e-6)
    assert pair["mde"] is None


def test_critical_failures_of_fractional_scores():
    pair = judge_cell(spec(), *arms([1, 1, 0.9992, 0.5, 1], [0.75, 1, 0.5, 0.0, 0.999]))
    assert pair["critical"] == 2


def chunks(reference, candidate, tokens, books):
    return tuple(
        [
            row(i, math.exp(nll), arm, book, metric="perplexity")
            | {"scores": {"perplexity": math.exp(nll), "nll_suffix": nll, "n_targets": n}}
            for i, (nll, n, book) in enumerate(zip(values, tokens, books, strict=True))
        ]
        for arm, values in (("dense", reference), ("cand", candidate))
    )


def ppl(**changes):
    return spec(task="ppl", metric="perplexity", margin=0.02, cluster="book", **changes)


def test_the_golden_perplexity_ratio():
    pair = judge_cell(ppl(), *chunks([2.0] * 6, [2.2] * 6, [4] * 6, range(6)))
    assert pair["reference_score"] == pytest.approx(7.389056, abs=5e-7)
    assert pair["candidate_score"] == pytest.approx(9.025013, abs=5e-7)
    assert pair["ratio"] == pytest.approx(1.221403, abs=5e-7)
    assert pair["verdict"] == "fail"
    assert pair["reasons"] == ["ratio 1.221 is above 1.02"]


def test_perplexity_is_weighted_by_tokens_and_its_sign_is_turned():
    pair = judge_cell(ppl(), *chunks([2.0] * 6, [2.3, *[2.0] * 5], [10, *[2] * 5], range(6)))
    assert pair["difference"] == pytest.approx(0.3 * 10 / 20)
    lower = judge_cell(ppl(), *chunks([2.0] * 6, [1.5] * 6, [4] * 6, range(6)))
    assert (lower["verdict"], lower["labels"]) == ("pass", ["better"])


@pytest.mark.parametrize(("ratio", "verdict"), [(1.019, "pass"), (1.021, "fail")])
def test_the_limit_of_perplexity_is_a_ratio(ratio, verdict):
    moved = [2.0 + math.log(ratio)] * 8
    assert judge_cell(ppl(), *chunks([2.0] * 8, moved, [4] * 8, range(8)))["verdict"] == verdict


def test_three_books_cannot_pass_and_can_fail():
    books = [i % 3 for i in range(20)]
    near = judge_cell(ppl(), *chunks([2.0] * 20, [2.0001] * 20, [4] * 20, books))
    far = judge_cell(ppl(), *chunks([2.0] * 20, [5.0] * 20, [4] * 20, books))
    assert (near["verdict"], far["verdict"]) == ("inconclusive", "fail")


def test_one_chunk_gives_no_interval_and_no_verdict():
    pair = judge_cell(ppl(), *chunks([2.0], [2.5], [4], [0]))
    assert pair["difference_ci"] is None
    assert pair["verdict"] == "inconclusive"


def test_a_margin_of_perplexity_is_no_ratio():
    with pytest.raises(SpecError, match=r"0\.02 for a ratio of 1\.02"):
        spec(metric="perplexity", margin=1.02)


# -- macro --------------------------------------------------------------------------------------------------


def test_macro_weighs_parts_equally_and_is_the_headline():
    first = (spec(task="ruler/vt", margin=0.10), *arms([1] * 100, [1] * 90 + [0] * 10))
    second = (spec(task="ruler/cwe", margin=0.10), *arms([0.5] * 50, [0.5] * 50))
    pairs = judge([first, second])
    macro = pairs[-1]
    assert [p["task"] for p in pairs] == ["ruler/vt", "ruler/cwe", "ruler"]
    assert [p["headline"] for p in pairs] == [False, False, True]
    assert macro["metric"] == "macro"
    assert macro["difference"] == pytest.approx((-0.10 + 0) / 2)
    # se of the first part by hand; the second has none
    se = math.sqrt(0.1 * 0.9 / 99) / 2
    low, high = macro["difference_ci"]
    assert low < -0.05 - 1.98 * se < -0.05 + 1.98 * se < high
    assert macro["n"] == 150


def test_macro_of_binary_parts_sums_the_flips():
    parts = [(spec(task=f"ruler/{name}"), *table(30, b, c, 10)) for name, b, c in (("a", 6, 1), ("b", 4, 1))]
    macro = judge(parts)[-1]
    assert (macro["reference_only"], macro["candidate_only"]) == (10, 2)
    assert macro["mcnemar_p"] == pytest.approx(0.0385742188, rel=1e-8)


def test_a_broken_part_keeps_the_macro_from_passing():
    good = (spec(task="ruler/a"), *table(200, 0, 0, 0))
    reference, candidate = table(200, 0, 0, 0)
    whole = judge([good, (spec(task="ruler/b"), reference, candidate)])
    broken = judge([good, (spec(task="ruler/b"), reference, candidate[:-1])])
    assert whole[-1]["verdict"] == "pass"
    assert broken[-1]["verdict"] == "inconclusive"


# -- pairing ------------------------------------------------------------------------------------------------


def changed(rows, i, **changes):
    return [r | changes if k == i else r for k, r in enumerate(rows)]


def codes(pair):
    return {problem["kind"]: problem["code"] for problem in pair["problems"]}


def test_another_prompt_is_never_compared():
    reference, candidate = table(200, 0, 0, 0)
    pair = judge_cell(spec(), reference, changed(candidate, 3, prompt_ids_sha256="x"))
    assert codes(pair) == {"prompts_differ": 5}
    assert (pair["n"], pair["difference"], pair["verdict"]) == (0, None, "inconclusive")
    assert "niah//8192/0003" in pair["problems"][0]["what"]


@pytest.mark.parametrize(("name", "value"), [("max_new_tokens", 7), ("stop_ids", [2]), ("seed", -1)])
def test_another_setting_of_a_sample_is_never_compared(name, value):
    reference, candidate = table(200, 0, 0, 0)
    pair = judge_cell(spec(), reference, changed(candidate, 3, **{name: value}))
    assert codes(pair) == {"settings_differ": 5}
    assert name in pair["problems"][0]["what"]


def test_runs_without_a_common_sample_are_not_comparable():
    reference, candidate = table(5, 0, 0, 0)
    pair = judge_cell(spec(), reference, [r | {"sample_id": "x" + r["sample_id"]} for r in candidate])
    assert codes(pair)["no_common_samples"] == 5


@pytest.mark.parametrize("empty", ["reference", "candidate", "both"])
def test_a_run_that_holds_no_sample_is_incomplete_and_not_another_setting(empty):
    reference, candidate = table(5, 0, 0, 0)
    arms = (
        [] if empty in (name, "both") else rows
        for name, rows in (("reference", reference), ("candidate", candidate))
    )
    pair = judge_cell(spec(), *arms)
    assert codes(pair) == {"no_samples": 6}
    assert pair["verdict"] == "inconclusive"


def test_other_prompts_allowed_are_two_samples_that_cannot_pass():
    reference, candidate = table(400, 0, 0, 0)
    other = [r | {"prompt_ids_sha256": "x"} for r in candidate]
    pair = judge_cell(spec(allow_mismatch=True), reference, other)
    assert (pair["verdict"], pair["ci_method"], pair["problems"]) == (
        "inconclusive",
        "newcombe-independent",
        [],
    )
    assert pair["difference_ci"][0] > -0.05
    assert "prompts differ" in pair["labels"]
    lost = [r | {"scores": {"accuracy": 0.0}} for r in other]
    assert judge_cell(spec(allow_mismatch=True), reference, lost)["verdict"] == "fail"


def test_a_missing_sample_is_told_and_forbids_a_pass():
    reference, candidate = table(200, 0, 0, 0)
    pair = judge_cell(spec(), reference, candidate[1:])
    assert codes(pair) == {"missing_samples": 6}
    assert (pair["n"], pair["n_planned"], pair["verdict"]) == (199, 200, "inconclusive")
    assert reference[0]["sample_id"] in pair["problems"][0]["what"]
    assert judge_cell(spec(max_missing=1), reference, candidate[1:])["verdict"] == "pass"
    partial = judge_cell(spec(partial=True), reference, candidate[1:])
    assert (partial["problems"], partial["verdict"]) == ([], "inconclusive")


def test_samples_that_neither_run_holds_are_missing():
    pair = judge_cell(spec(n_planned=220), *table(200, 0, 0, 0))
    assert codes(pair) == {"missing_samples": 6}
    assert pair["problems"][0]["count"] == 20


@pytest.mark.parametrize("status", ["nan", "oom", "error"])
def test_a_failed_sample_is_neither_wrong_nor_dropped(status):
    reference, candidate = table(200, 0, 0, 0)
    failed = changed(candidate, 0, status=status, scores=None)
    pair = judge_cell(spec(), reference, failed)
    assert codes(pair) == {"sample_errors": 6}
    assert (pair["n"], pair["difference"], pair["verdict"]) == (199, 0, "inconclusive")
    assert judge_cell(spec(max_errors=1), reference, failed)["problems"] == []


@pytest.mark.parametrize("reason", ["short_context", "budget_ge_context", "no_decode_steps"])
def test_a_mode_that_had_nothing_to_do_cannot_pass(reason):
    reference, candidate = table(200, 0, 0, 0)
    idle = changed(candidate, 4, engaged={"engaged": False, "reason": reason})
    pair = judge_cell(spec(), reference, idle)
    assert (pair["problems"], pair["verdict"]) == ([], "inconclusive")
    assert "not engaged" in pair["labels"]
    assert any("199 of 200" in text and reason in text for text in pair["reasons"])


def test_a_mode_that_did_nothing_breaks_the_run():
    reference, candidate = table(200, 0, 0, 0)
    idle = changed(candidate, 4, engaged={"engaged": False, "reason": "inactive"})
    assert codes(judge_cell(spec(), reference, idle)) == {"inactive": 6}
    allowed = judge_cell(spec(allow_inactive=True), reference, idle)
    assert (allowed["problems"], allowed["verdict"]) == ([], "inconclusive")
    assert judge_cell(spec(exact_candidate=True), reference, idle)["verdict"] == "pass"


def test_a_lying_mode_is_found_by_its_outputs():
    reference, candidate = table(200, 0, 0, 0)
    copied = [r | {"engaged": c["engaged"]} for r, c in zip(reference, candidate, strict=True)]
    pair = judge_cell(spec(), reference, copied)
    assert codes(pair) == {"not_applied": 6}
    assert pair["verdict"] == "inconclusive"
    assert "mode not applied" in pair["labels"]
    # one other logit shows that something happened
    moved = changed(copied, 7, first_logits_sha256="other")
    assert judge_cell(spec(), reference, moved)["verdict"] == "pass"
    # certificates of its steps are proof enough, and the same mode again should give the same
    certified = [row | {"steps": True} for row in copied]
    assert judge_cell(spec(), reference, certified)["problems"] == []
    assert judge_cell(spec(same_mode=True), reference, copied)["problems"] == []
    # without logits nothing is claimed
    unknown = [[r | {"first_logits_sha256": None} for r in arm] for arm in (reference, copied)]
    assert judge_cell(spec(), *unknown)["problems"] == []


def test_controls_switched_off_forbid_a_pass():
    pair = judge_cell(spec(controls=False), *table(200, 0, 0, 0))
    assert (pair["verdict"], pair["reasons"]) == ("inconclusive", ["the controls were switched off"])


def test_the_order_of_rows_changes_no_number():
    reference, candidate = by_needle(DENSE_8K, *CERTIFIED_8K)
    fractions = arms(
        [i % 7 / 7 for i in range(40)], [i % 5 / 5 for i in range(40)], [i % 8 for i in range(40)]
    )
    for rows in ((reference, candidate), fractions):
        shuffled = tuple(random.Random(i).sample(arm, len(arm)) for i, arm in enumerate(rows))
        assert judge_cell(spec(), *shuffled) == judge_cell(spec(), *rows)


# -- beside the verdict -------------------------------------------------------------------------------------


def test_noise_floor_of_the_printed_example():
    reference = [row(i, 1, "dense", 0) for i in range(100)]
    again = [row(i, i not in (0, 1), "dense", 0) for i in range(100)]
    candidate = [row(i, i not in (2, 3, 4, 5, 6), "cand", 0) for i in range(100)]
    found = noise_floor(reference, again, candidate)
    assert found["excess"] == pytest.approx(0.03)
    assert found["mcnemar_p"] == pytest.approx(0.453125)
    assert found["excess_ci"] == pytest.approx([-0.02748, 0.09511], abs=5.1e-6)
    assert found["labels"] == []
    same = noise_floor(reference * 1, again, again)
    assert (same["excess"], same["labels"]) == (0, [])
    many = [row(i, 1, "dense", 0) for i in range(400)]
    assert noise_floor(many, many, many)["labels"] == ["indistinguishable from dense noise"]


def test_costs_are_ratios_or_null_with_a_status():
    cells = [{"step_ms_p50": 4.0, "bytes": {"device": 100}}, {"step_ms_p50": 1.0, "bytes": {"device": 44}}]
    pair = add_costs({}, *cells, timing_comparable=True)
    assert pair == {"latency_ratio": 0.25, "device_bytes_ratio": 0.44}
    other = add_costs({}, *cells, timing_comparable=False)
    assert (other["latency_ratio"], other["latency_status"]) == (None, "timing_contract_differs")
    unmeasured = add_costs({}, {"step_ms_p50": None, "bytes": None}, cells[1], timing_comparable=True)
    assert unmeasured == {"latency_ratio": None, "latency_status": "not_measured", "device_bytes_ratio": None}
