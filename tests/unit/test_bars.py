"""What a gate has to keep: published tables, false alarms of equal arms, refusals by name."""

import random

import pytest

from rcq_cli.contract import LEVELS, Level
from rcq_cli.gates import evaluate_gates
from rcq_cli.judge import judge
from rcq_cli.latency import latency_gate, paired_times
from rcq_cli.pairing import PairSpec
from tests.unit.stored_runs import ask, outcomes, stored_run
from tests.unit.test_compare import compared

MUST = sorted(name for name, level in LEVELS.items() if level is Level.MUST)
# both, dense only, candidate only, neither of the published needle tables, with their exact McNemar p
PUBLISHED = {
    "certified 8K": ((23, 16, 16, 45), 1.0, "inconclusive"),
    "certified 32K": ((46, 5, 3, 46), 0.7265625, "inconclusive"),
    "certified 64K": ((64, 2, 2, 32), 1.0, "inconclusive"),
    "naive 8K": ((8, 31, 0, 61), 9.3132257e-10, "fail"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_tables_through_the_command_at_a_margin_of_two_points(name, tmp_path, capsys):
    table, p, verdict = PUBLISHED[name]
    reference, candidate = outcomes(*table)
    runs = (
        str(stored_run(tmp_path, "dense", reference)),
        str(stored_run(tmp_path, "kivi", candidate, reason=" ")),
    )
    document = compared(capsys, *runs, "--margin", "0.02")
    (pair,) = document["pairs"]
    assert pair["mcnemar_p"] == pytest.approx(p, rel=1e-7)
    assert pair["verdict"] == verdict
    assert document["exit_code"] == (3 if verdict == "fail" else 0)


def arms(seed: int, n: int, flips: float) -> tuple[list[dict], list[dict]]:
    """Return two arms that are equal but for noise: each sample flips either way with the same chance."""
    chance = random.Random(seed)
    rows: tuple[list[dict], list[dict]] = ([], [])
    for i in range(n):
        right = chance.random() < 0.7
        values = [right != (chance.random() < flips) for _ in rows]
        for arm, (found, value) in enumerate(zip(rows, values, strict=True)):
            found.append(
                {
                    "sample_id": f"niah/{i:04d}",
                    "prompt_ids_sha256": str(i),
                    "max_new_tokens": 8,
                    "stop_ids": [1],
                    "seed": i,
                    "cluster": f"form {i % 10}",
                    "status": "ok",
                    "scores": {"accuracy": float(value)},
                    "text": f"{arm} {i}",
                    "finish_reason": "eos",
                    "engaged": {"engaged": True, "reason": ""},
                    "first_logits_sha256": str(arm),
                }
            )
    return rows


@pytest.mark.parametrize(("margin", "flips"), [(0.02, 0.05), (0.05, 0.10)])
def test_equal_arms_fail_at_most_one_time_in_twenty(margin, flips, monkeypatch):
    """200 comparisons of equal arms, each of two contexts, through verdicts, Holm's correction and gates."""
    # resampled intervals are reported beside the verdict and never enter it
    monkeypatch.setattr("rcq_cli.stats.bootstrap", lambda *_a, **_k: (0.0, 0.0))
    failed = 0
    for seed in range(200):
        cells = []
        for ctx in (4096, 8192):
            spec = PairSpec(task="niah", ctx=ctx, reference="dense", candidate="again", margin=margin)
            cells.append((spec, *arms(seed * 100_000 + ctx, 110, flips)))
        failed += evaluate_gates(judge(cells), []).exit_code() == 3
    assert failed <= 10


def clocked(seed: int, slower: float = 1.0) -> list[dict[str, dict]]:
    """Return step times of two arms that took turns on a machine that drifts."""
    chance = random.Random(seed)
    arms: list[dict[str, dict]] = [{}, {}]
    for i in range(22):
        drift = chance.lognormvariate(0, 0.2)
        for arm, factor in zip(arms, (1.0, slower), strict=True):
            steps = [round(1e7 * drift * factor * chance.lognormvariate(0, 0.1)) for _ in range(16)]
            arm[str(i)] = {"prefill_ns": 1000 + i, "step_ns": steps}
    return arms


def test_equal_arms_fail_a_gate_on_time_at_most_one_time_in_twenty():
    verdicts = [timed(*clocked(seed), 0.02) for seed in range(200)]
    assert verdicts.count("fail") <= 10
    assert "pass" in {timed(*clocked(seed), 0.25) for seed in range(3)}


def test_a_mode_that_is_slower_than_allowed_fails_the_gate_on_time():
    assert {timed(*clocked(seed, slower=1.5), 0.25) for seed in range(20)} == {"fail"}


def timed(reference: dict, candidate: dict, margin: float) -> str:
    pair = {"task": "niah", "ctx": 4096, "candidate": "again"} | paired_times(reference, candidate)
    return latency_gate(pair, margin, strict=False).status


def test_the_ratio_of_times_is_that_of_the_paired_blocks():
    one = {str(i): {"prefill_ns": 5, "step_ns": [99, 99, 10 * (i + 1), 10 * (i + 1)]} for i in range(6)}
    two = {key: {"prefill_ns": 5, "step_ns": [1, 1, 3 * t["step_ns"][2]]} for key, t in one.items()}
    found = paired_times(one, two)
    assert found["latency_ratio"] == pytest.approx(3.0)
    assert found["latency_ci"] == pytest.approx([3.0, 3.0])
    assert found["latency_blocks"] == 6


def test_times_of_runs_that_did_not_share_their_prefills_are_not_paired():
    one, two = clocked(1)
    apart = {key: record | {"prefill_ns": record["prefill_ns"] + 7} for key, record in two.items()}
    assert paired_times(one, apart) == {"latency_paired": False, "latency_blocks": 0}
    pair = {"task": "niah", "ctx": 4096, "candidate": "again", "latency_paired": False}
    gate = latency_gate(pair, 0.1, strict=False)
    assert (gate.status, gate.code) == ("not evaluated", 5)


@pytest.mark.parametrize("name", MUST)
def test_a_changed_must_field_of_a_run_is_5_with_its_name(name, tmp_path, capsys):
    dense = stored_run(tmp_path, "dense", [1.0])
    other = stored_run(tmp_path, "kivi", [1.0], fields={name: "changed"}, reason=" ")
    code, out, err = ask(capsys, "compare", str(dense), str(other))
    assert (code, out) == (5, "")
    assert name in err
    assert "'changed'" in err


def test_explicit_gates_on_time_are_5_where_runs_did_not_take_turns(tmp_path, capsys):
    dense = str(stored_run(tmp_path, "dense", [1.0] * 30))
    other = str(stored_run(tmp_path, "kivi", [1.0] * 30, reason=" "))
    assert ask(capsys, "compare", dense, other)[0] == 0
    code, _, err = ask(capsys, "compare", dense, other, "--latency-margin", "0.5")
    assert code == 5
    assert "--samples 5 or more" in err
    assert "--allow-mismatch" not in err
    code, _, err = ask(capsys, "compare", dense, other, "--fail-on", "profile.decode_ms.ratio > 9")
    assert code == 5
    assert "took turns in one process" in err


# -- noise floor --------------------------------------------------------------------------------------------


def test_a_second_reference_tells_noise_from_damage(tmp_path, capsys):
    """The printed example: 5 samples flip in the candidate alone, 2 in the second reference alone."""
    right = [1.0] * 100
    dense = str(stored_run(tmp_path, "dense", right))
    again = str(stored_run(tmp_path, "dense", [0.0] * 2 + [1.0] * 98))
    other = str(stored_run(tmp_path, "kivi", [1.0] * 2 + [0.0] * 5 + [1.0] * 93, reason=" "))
    floor = compared(capsys, dense, other, "--noise-floor", again)["pairs"][0]["noise_floor"]
    assert floor["excess"] == pytest.approx(0.03)
    assert floor["excess_ci"] == pytest.approx([-0.02748, 0.09511], abs=5.1e-6)
    assert floor["mcnemar_p"] == pytest.approx(0.453125)
    assert floor["labels"] == []
    _, out, _ = ask(capsys, "compare", dense, other, "--noise-floor", again)
    assert "noise floor: the reference flips 0.020 against itself, this mode 0.050" in out
    labels = compared(capsys, dense, other, "--noise-floor", again, "--flip-margin", "0.1")
    assert labels["pairs"][0]["noise_floor"]["labels"] == ["indistinguishable from dense noise"]


def test_a_run_that_repeats_no_reference_is_no_noise_floor(tmp_path, capsys):
    dense = str(stored_run(tmp_path, "dense", [1.0] * 2))
    other = str(stored_run(tmp_path, "kivi", [1.0] * 2, reason=" "))
    wrong = {
        dense: 2,
        other: 5,
        str(stored_run(tmp_path, "dense", [1.0] * 2, ctx=4096)): 2,
        str(stored_run(tmp_path, "dense", [1.0] * 2, fields={"model.dtype": "float16"})): 5,
        str(tmp_path / "nothing"): 2,
    }
    for run, code in wrong.items():
        got, out, err = ask(capsys, "compare", dense, other, "--noise-floor", run)
        assert (got, out) == (code, "")
        assert "noise-floor" in err or "no run folder" in err
