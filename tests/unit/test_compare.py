"""`rcq compare` from stored runs to table, document and exit code."""

import csv
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit.stored_runs import ask, outcomes, stored_run

# the published outcomes of the seed paper at 8K: both, dense only, candidate only, neither
NAIVE_8K = (8, 31, 0, 61)


@pytest.fixture
def published(tmp_path: Path) -> tuple[str, str]:
    dense, naive = outcomes(*NAIVE_8K)
    return str(stored_run(tmp_path, "dense", dense)), str(stored_run(tmp_path, "naive", naive, reason=" "))


def compared(capsys: pytest.CaptureFixture, *argv: str) -> dict:
    code, out, _ = ask(capsys, "compare", *argv, "--json")
    document = json.loads(out)
    assert document["exit_code"] == code
    return document


def test_step_times_of_runs_that_took_no_turns_are_called_so(published, capsys):
    _, out, _ = ask(capsys, "compare", *published)
    assert "1.00x" in out
    assert "naive: step times of runs apart" in out


def test_the_published_naive_run_is_judged_as_published(published, capsys):
    document = compared(capsys, *published)
    (pair,) = document["pairs"]
    assert [pair[k] for k in ("both", "reference_only", "candidate_only", "neither")] == list(NAIVE_8K)
    assert pair["mcnemar_p"] == pytest.approx(9.3132257e-10)
    assert pair["difference"] == pytest.approx(-0.31)
    assert pair["difference_ci"] == pytest.approx([-0.40626, -0.22780], abs=1e-5)
    assert (pair["verdict"], pair["expected"]) == ("fail", True)
    assert document["exit_code"] == 0
    assert document["gate"]["passed"] is True


def test_the_document_has_the_documented_keys(published, capsys):
    document = compared(capsys, *published)
    always = {"schema", "command", "contract", "run", "cells", "pairs", "gate", "exit_code"}
    assert set(document) == always | {"contracts", "baseline", "warnings", "judgement"}
    assert len(document["contract"]) == 64
    assert document["run"] is None
    assert [cell["run"] for cell in document["cells"]] == list(published)
    assert {"passed", "failures", "gates"} <= set(document["gate"])


def test_a_loss_that_nobody_announced_fails_the_gate(published, capsys):
    code, out, err = ask(capsys, "compare", *published, "--expect", "naive=pass")
    assert code == 3
    assert "FAIL" in out
    assert [line[:7] for line in err.splitlines() if line.startswith(("error", "  why", "  fix"))] == [
        "error: ",
        "  why: ",
        "  fix: ",
    ]


def test_exit_zero_silences_a_gate_but_no_violation(tmp_path, published, capsys):
    assert ask(capsys, "compare", *published, "--expect", "naive=pass", "--exit-zero")[0] == 0
    broken = stored_run(tmp_path, "certified", outcomes(*NAIVE_8K)[0], violations=2, reason=" ")
    code, out, err = ask(capsys, "compare", published[0], str(broken), "--exit-zero")
    assert code == 4
    assert "2 of 1000" in out
    assert "RCQ-CERT" in err


def test_an_undecided_cell_fails_only_when_strict(tmp_path, capsys):
    dense, other = outcomes(64, 2, 2, 32)
    runs = (
        str(stored_run(tmp_path, "dense", dense)),
        str(stored_run(tmp_path, "certified", other, reason=" ")),
    )
    assert compared(capsys, *runs, "--margin", "0.05")["pairs"][0]["verdict"] == "inconclusive"
    code, _, err = ask(capsys, "compare", *runs, "--margin", "0.05")
    assert code == 0
    assert err == "warning: no failure, but no clean pass either: niah@8192 certified (inconclusive)\n"
    assert ask(capsys, "compare", *runs, "--margin", "0.05", "--strict")[0] == 3


def test_alpha_and_margin_reach_the_verdict(tmp_path, capsys):
    dense, other = outcomes(64, 2, 2, 32)
    runs = (
        str(stored_run(tmp_path, "dense", dense)),
        str(stored_run(tmp_path, "certified", other, reason=" ")),
    )
    (pair,) = compared(capsys, *runs, "--margin", "0.05", "--alpha", "0.05")["pairs"]
    assert (pair["verdict"], pair["alpha"], pair["margin"]) == ("pass", 0.05, 0.05)
    assert compared(capsys, *runs)["pairs"][0]["margin"] == 0.15


def test_the_document_says_which_statistics_its_verdicts_rest_on(published, capsys):
    plain = {"alpha": 0.025, "cluster": "cluster", "verdict_interval": "tango"}
    assert compared(capsys, *published)["judgement"] == plain | {"interval_beside": None, "mcnemar": "exact"}
    asked = compared(capsys, *published, "--interval", "newcombe", "--midp", "--cluster", "none")
    changed = {"interval_beside": "newcombe", "mcnemar": "mid-p", "cluster": "none"}
    assert asked["judgement"] == plain | changed
    (pair,) = asked["pairs"]
    # the printed table of statistics.md: the verdict's interval is Tango's whatever stands beside it
    assert (pair["ci_method"], pair["p_method"]) == ("tango", "mcnemar mid-p")
    assert pair["difference_ci"] == pytest.approx([-0.40626, -0.22780], abs=5.1e-6)
    assert pair["newcombe_ci"] == pytest.approx([-0.40267, -0.21616], abs=5.1e-6)
    assert (pair["mcnemar_p"], pair["mcnemar_mid_p"]) == pytest.approx((9.3132257e-10, 4.6566129e-10))
    assert pair["mcnemar_p_holm"] is None
    assert pair["mcnemar_mid_p_holm"] == pair["mcnemar_mid_p"]


@pytest.mark.parametrize("form", ["table", "md"])
def test_newcombe_and_mid_p_are_named_where_they_are_shown(form, published, capsys):
    _, plain, _ = ask(capsys, "compare", *published, "-o", form)
    _, asked, _ = ask(capsys, "compare", *published, "--interval", "newcombe", "--midp", "-o", form)
    assert "Newcombe" not in plain
    assert "mid-p" not in plain
    assert "Newcombe [95%]" in asked
    assert "-0.310 [-0.406, -0.228]" in asked
    assert "[-0.403, -0.216]" in asked
    assert "p is McNemar's mid-p (--midp)" in asked
    if form == "table":
        assert "9.3e-10" in plain
        assert "4.7e-10" in asked
        assert "McNemar p" not in asked


def test_the_level_stands_over_the_interval(published, capsys):
    _, out, _ = ask(capsys, "compare", *published, "--alpha", "0.05", "--interval", "newcombe")
    assert "difference [90%]" in out
    assert "Newcombe [90%]" in out


def test_mid_p_decides_a_loss_that_the_exact_test_leaves_open(tmp_path, capsys):
    # five of five flips lost on 100: p = .0625, mid-p = .03125, at a loss of the whole margin
    dense, other = outcomes(80, 5, 0, 15)
    runs = (
        str(stored_run(tmp_path, "dense", dense)),
        str(stored_run(tmp_path, "certified", other, reason=" ")),
    )
    exact, mid = (compared(capsys, *runs, "--margin", "0.05", *more) for more in ((), ("--midp",)))
    assert (exact["pairs"][0]["verdict"], exact["exit_code"]) == ("inconclusive", 0)
    assert (mid["pairs"][0]["verdict"], mid["exit_code"]) == ("fail", 3)
    assert [d["pairs"][0]["labels"] for d in (exact, mid)] == [["underpowered (m<6)"], []]


def test_different_contracts_are_refused_and_every_field_is_named(tmp_path, published, capsys):
    other = stored_run(
        tmp_path, "certified", [1.0] * 100, fields={"model.id": "other", "model.dtype": "float16"}
    )
    code, out, err = ask(capsys, "compare", published[0], str(other))
    assert (code, out) == (5, "")
    for part in ("model.id", "'needle' and 'other'", "model.dtype", "--allow-mismatch"):
        assert part in err
    assert len(err.splitlines()) == 3
    code, _, err = ask(capsys, "compare", published[0], str(other), "--allow-mismatch")
    assert code != 5
    assert "model.id differs" in err


def test_one_refused_run_does_not_stop_the_table(tmp_path, published, capsys):
    other = stored_run(tmp_path, "certified", [1.0] * 100, fields={"model.id": "other"})
    code, out, _ = ask(capsys, "compare", *published, str(other))
    assert code == 5
    assert "naive" in out
    assert "model.id" in out


def test_an_unfinished_run_is_incomplete(tmp_path, published, capsys):
    begun = stored_run(tmp_path, "certified", [1.0] * 40, finish=False)
    code, _, err = ask(capsys, "compare", published[0], str(begun))
    assert code == 6
    assert "RCQ-CMP-16" in err


def test_a_partial_comparison_decides_nothing(tmp_path, published, capsys):
    scores = outcomes(*NAIVE_8K)[0]
    begun = str(stored_run(tmp_path, "certified", scores[:40], finish=False, reason=" "))
    document = compared(capsys, published[0], begun, "--partial")
    assert document["exit_code"] == 0
    assert document["pairs"][0]["verdict"] == "inconclusive"
    assert document["pairs"][0]["n"] == 40


def test_failed_samples_count_up_to_the_limit(tmp_path, published, capsys):
    scores = outcomes(*NAIVE_8K)[0]
    torn = str(stored_run(tmp_path, "certified", scores, failed=2, reason=" "))
    assert ask(capsys, "compare", published[0], torn)[0] == 6
    assert ask(capsys, "compare", published[0], torn, "--max-errors", "1")[0] == 6
    document = compared(capsys, published[0], torn, "--max-errors", "2")
    assert document["exit_code"] == 0
    assert document["pairs"][0]["n"] == 98


def test_a_mode_that_did_nothing_cannot_pass(tmp_path, published, capsys):
    scores = outcomes(*NAIVE_8K)[0]
    idle = str(stored_run(tmp_path, "certified", scores, engaged=False, reason="inactive"))
    assert ask(capsys, "compare", published[0], idle)[0] == 6
    document = compared(capsys, published[0], idle, "--allow-inactive")
    assert document["exit_code"] == 0
    assert document["pairs"][0]["verdict"] == "inconclusive"


def test_a_gate_expression_fails_or_is_refused(published, capsys):
    assert ask(capsys, "compare", *published, "--fail-on", "niah.accuracy.upper < -0.2")[0] == 3
    assert ask(capsys, "compare", *published, "--fail-on", "niah.accuracy.upper < -0.9")[0] == 0
    for gate in (
        "niah@64k.accuracy.upper < 0",
        "ruler.accuracy.upper < 0",
        "niah.acuracy.upper < 0",
        "nonsense",
    ):
        code, out, err = ask(capsys, "compare", *published, "--fail-on", gate)
        assert (code, out) == (2, "")
        assert len(err.splitlines()) == 1


def test_a_folder_that_is_no_run_is_named_with_the_reason(tmp_path, published, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "h").mkdir()
    for word, why in (("h", "no spec.json"), ("nowhere", "no folder and no mode")):
        code, _, err = ask(capsys, "compare", published[0], word)
        assert code == 2
        assert f"{word!r} is no run folder" in err
        assert why in err
        assert "do not mix" not in err
    for mode in ("naive:group=32", "zipc"):  # a unique leading word is a name as well
        assert "do not mix" in ask(capsys, "compare", published[0], mode)[2]


def test_the_table_tells_everything_and_is_complete_when_piped(tmp_path, published, capsys):
    good = stored_run(tmp_path, "certified", outcomes(*NAIVE_8K)[0], violations=0, reason=" ")
    _, out, _ = ask(capsys, "compare", *published, str(good))
    rows = {line.split("  ")[0]: line for line in out.splitlines()}
    assert "needle (constructed)" in out
    assert "niah@8k" in out
    assert "reference" in rows["dense"]
    for part in (
        "-0.310 [-0.406, -0.228]",
        "FAIL (expected)",
        "9.3e-10",
        "0.310 (31 lost, 0 won)",
        "50%",
        "1.00x",
    ):
        assert part in rows["naive"]
    for part in ("pass", "0.006, 0.021", "0: 98%", "1: 1%", "4: 1%", "0 of 1000"):
        assert part in rows["certified"]
    assert "\x1b[" not in out
    assert "\u2026" not in out


def test_at_eighty_columns_nothing_is_cut(published, capsys, monkeypatch):
    monkeypatch.setenv("RCQ_WIDTH", "80")
    _, out, _ = ask(capsys, "compare", *published)
    assert max(map(len, out.splitlines())) <= 80
    assert "-0.310 [-0.406, -0.228]" in out
    assert "0.310 (31 lost, 0 won)" in out


def test_every_format_is_complete(published, capsys):
    _, out, _ = ask(capsys, "compare", *published, "-o", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["mode"] for row in rows] == ["dense", "naive"]
    assert float(rows[1]["pair.difference_ci.low"]) == pytest.approx(-0.40626, abs=1e-5)
    assert rows[1]["bytes.device"] == "100"
    _, out, _ = ask(capsys, "compare", *published, "-o", "jsonl")
    assert [json.loads(line)["mode"] for line in out.splitlines()] == ["dense", "naive"]
    _, out, _ = ask(capsys, "compare", *published, "-o", "md")
    assert "| 8k | naive | 0.390 | 0.080 | -0.310 [-0.406, -0.228] | 31/0 | 0.310 | 31 |" in out
    assert "FAIL (expected)" in out


def test_a_failed_gate_still_writes_the_document_to_its_path(tmp_path, published, capsys):
    target = tmp_path / "result.json"
    code, out, _ = ask(capsys, "compare", *published, "--expect", "naive=pass", "--json", str(target))
    assert code == 3
    assert out.startswith("rcq 0.1.0")
    assert json.loads(target.read_text("utf-8"))["exit_code"] == 3


def test_stored_runs_are_compared_without_torch(published):
    program = (
        "import sys; from rcq_cli.main import run; code = run(sys.argv[1:]);"
        "sys.exit(99 if {'torch', 'transformers'} & set(sys.modules) else code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "compare", *published], capture_output=True, check=False
    )
    assert done.returncode == 0


@pytest.mark.parametrize("turned", [False, True])
def test_runs_of_several_contexts_are_compared_context_by_context(tmp_path, capsys, turned):
    lost = {1024: 2, 4096: 3}
    runs = [
        str(stored_run(tmp_path, mode, [float(i >= wrong) for i in range(60)], ctx=ctx, reason=" "))
        for ctx, count in lost.items()
        for mode, wrong in (("dense", 0), ("certified", count))
    ]
    if turned:  # whatever the order, the mode of the first folder is the reference
        runs[2:] = runs[:1:-1]
    pairs = {pair["ctx"]: pair for pair in compared(capsys, *runs)["pairs"]}
    assert {ctx: pair["reference_only"] for ctx, pair in pairs.items()} == lost
    assert {(pair["reference"], pair["candidate"]) for pair in pairs.values()} == {("dense", "certified")}


def test_runs_of_two_contexts_and_one_mode_are_refused(tmp_path, capsys):
    runs = [str(stored_run(tmp_path, "dense", [1.0] * 20, ctx=ctx)) for ctx in (1024, 4096)]
    code, _, told = ask(capsys, "compare", *runs)
    assert code == 5
    assert "task.ctx" in told


def test_two_runs_of_one_mode_are_told_apart(tmp_path, capsys):
    runs = [str(stored_run(tmp_path, "certified", [1.0] * 100, reason=str(i))) for i in range(2)]
    document = compared(capsys, *runs)
    assert len({cell["mode"] for cell in document["cells"]}) == 2
    assert document["pairs"][0]["reference"] == f"certified ({Path(runs[0]).name})"


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dense"],
        ["dense", "dense"],
        ["dense", "{run}"],
        ["{run}"],
        ["{run}", "{run}"],
        ["{run}", "runs/none"],
        ["{run}", "{other}", "--task", "niah"],
        ["{run}", "{other}", "-O", "eps=0.1"],
        ["{run}", "{other}", "--margin", "1.5"],
        ["{run}", "{other}", "--margin", "small"],
        ["{run}", "{other}", "--cluster", "some"],
        ["{run}", "{other}", "--interval", "wilson"],
        ["{run}", "{other}", "--expect", "naive=maybe"],
        ["{run}", "{other}", "--expect", "naiv=fail"],
        ["dense", "certified", "--expect", "kivi=fail"],
        ["dense", "certified", "--fail-on", "ruler.accuracy.upper < 0"],
    ],
)
def test_what_cannot_be_compared_is_a_usage_error(argv, published, capsys):
    words = [word.format(run=published[0], other=published[1]) for word in argv]
    code, out, err = ask(capsys, "compare", *words)
    assert (code, out) == (2, "")
    assert len(err.splitlines()) == 1
