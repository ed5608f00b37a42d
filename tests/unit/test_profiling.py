"""Profiles: shares that sum, cold starts kept apart, ledgers that are what is allocated, honest nulls."""

import gc
import io
import json
import sys

import pytest
import torch

from rcq_cli import LayerCache, phases, profiling
from rcq_cli.certify.spectral import SpectralBound
from rcq_cli.commands import _profile
from rcq_cli.engine import clock as clocks
from rcq_cli.engine import ledger
from rcq_cli.engine.clock import CpuClock, StepTimes
from rcq_cli.engine.stepper import LayerStepper
from rcq_cli.engine.synthetic import GEOMETRIES, VARIANTS, layer_geometry, topics
from rcq_cli.main import run
from rcq_cli.profiling import Effort, Timed
from rcq_cli.readings import measured
from rcq_cli.reports.breakdown import LETTERS, bar_text
from rcq_cli.telemetry import bandwidth

ARGV = ("profile", "--breakdown", "--geometry", "smollm2-135m", "--ctx", "1k", "--steps", "5", "--pairs", "2")


def briefly(*argv):
    """Run `rcq` with little effort; return the exit code and the document."""
    out = io.StringIO()
    kept, sys.stdout = sys.stdout, out
    effort = profiling.Effort._field_defaults
    try:
        profiling.Effort.__new__.__defaults__ = (5, 2, 5, 0.2, 1.0, 1.0)
        code = run([*argv, "--steps", "5", "--pairs", "2", "--json", "-q"])
    finally:
        sys.stdout = kept
        profiling.Effort.__new__.__defaults__ = tuple(effort.values())
    return code, json.loads(out.getvalue())


@pytest.fixture(scope="module")
def profiled():
    """One real profile of one small layer: its exit code and document."""
    return briefly(*ARGV[:-4])


def test_a_whole_model_is_profiled_with_its_weights_and_two_modes_at_once():
    code, document = briefly(
        "profile",
        "--breakdown",
        "--ctx",
        "1k",
        "--mode",
        "certified",
        "--mode",
        "dense",
        "-T",
        "controls=off",
    )
    assert code == 0
    assert [cell["mode"] for cell in document["cells"]] == ["certified", "dense"]
    certified, dense = document["cells"]
    for cell in document["cells"]:
        rows = {row["name"]: row for row in cell["phases"]}
        assert sum(row["share"] for row in rows.values() if row["share"] is not None) == pytest.approx(1)
        # the model's own part reads weights, which neither mode changes
        assert rows["model"]["share"] > 0
        assert rows["model"]["bytes"] == certified["phases"][0]["bytes"]
        weights = [e["bytes"] for e in cell["memory"]["ledger"] if e["tier"] == "weights"]
        assert 0 < rows["model"]["bytes"] <= weights[0]
        items = {entry["item"] for entry in cell["memory"]["ledger"]}
        assert "layers left as they are" in items
    assert (certified["ratio"]["pairs"], len(certified["ratio_ci"])) == (2, 2)
    assert (dense["ratio_to_dense"], dense["ratio"]) == (1.0, None)
    # float32 keys and values of one managed layer: twice what 16 bit would take
    assert dense["memory"]["tier1_bytes"] == 2 * dense["memory"]["dense_equivalent_bytes"]


def test_a_profile_has_every_phase_and_shares_that_sum_to_one(profiled):
    code, document = profiled
    assert code == 0
    assert (document["schema"], document["command"]) == (1, "profile")
    assert [row["name"] for row in document["phases"]] == list(LETTERS)
    assert sum(row["share"] for row in document["phases"] if row["share"] is not None) == pytest.approx(1)
    by_name = {row["name"]: row for row in document["phases"]}
    assert 0 <= by_name["unattributed"]["share"] < 1
    assert by_name["model"]["share"] is None
    assert by_name["model"]["status"] == "not_applicable"


def test_every_missing_number_has_a_status_and_none_is_zero(profiled):
    document = profiled[1]
    for row in document["phases"]:
        if row["share"] is None:
            assert row["status"] != "ok"
            assert all(row[name] is None for name in ("p50_ms", "p90_ms", "bytes", "gb_per_s"))
    assert document["step_ms"]["p99"] is None
    assert "n is 5" in document["step_ms"]["p99_status"]
    for name in ("allocator", "nvml"):
        reading = document["memory"][name]
        assert (reading["value"] is None) == (reading["status"] not in ("ok", "inferred", "sampled"))
    assert document["bandwidth"]["read_gb_per_s"] > 0


def test_the_three_memory_totals_stand_together_and_add_up(profiled):
    memory = profiled[1]["memory"]
    tiers = {}
    for entry in memory["ledger"]:
        tiers[entry["tier"]] = tiers.get(entry["tier"], 0) + entry["bytes"]
    assert memory["tier1_bytes"] == tiers["device"]
    assert memory["device_total_bytes"] == tiers["device"] + tiers["scratch"]
    assert memory["system_total_bytes"] == sum(tiers.values())
    assert memory["dense_equivalent_bytes"] == 2 * 3 * 64 * 2 * profiled[1]["window"]["last_tokens"]


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp949"])
@pytest.mark.parametrize(
    "env",
    [{}, {"NO_COLOR": "1"}, {"FORCE_COLOR": "1"}, {"TERM": "dumb"}, {"FORCE_COLOR": "1", "TERM": "dumb"}],
)
@pytest.mark.parametrize("flags", [("--json",), ("--json", "--ascii"), ("-o", "json", "--color", "always")])
def test_json_is_one_pure_document_on_every_stream(profiled, monkeypatch, encoding, env, flags):
    document = profiled[1]
    cell = {name: value for name, value in document.items() if name not in ("schema", "command")}
    monkeypatch.setattr("rcq_cli.commands.profile._measure", lambda *_: [cell])
    for name in ("NO_COLOR", "FORCE_COLOR", "TERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding))
    assert run([*ARGV, *flags]) == 0
    sys.stdout.flush()
    text = raw.getvalue()
    assert b"\x1b" not in text
    assert text.endswith(b"}\n")
    assert json.loads(text.decode("ascii")) == document


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "cp949"])
def test_the_tables_are_written_in_every_encoding(profiled, monkeypatch, encoding):
    cell = {name: value for name, value in profiled[1].items() if name not in ("schema", "command")}
    monkeypatch.setattr("rcq_cli.commands.profile._measure", lambda *_: [cell])
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding=encoding, errors="strict"))
    assert run(ARGV) == 0
    sys.stdout.flush()
    text = raw.getvalue().decode(encoding)
    assert "?" not in text
    assert "phases of the step" in text
    assert "system in all, host included" in text


def test_the_bar_has_its_width_and_the_proportions_of_the_shares():
    shares = {"model": 0.5, "append": 0.001, "attend": 0.25, "unattributed": 0.249}
    text = bar_text([{"name": name, "share": share} for name, share in shares.items()], 100)
    assert len(text) == 100
    assert (text.count("m"), text.count("a"), text.count("t"), text.count(".")) == (50, 0, 25, 25)


def test_a_scripted_cold_start_is_left_out_and_reported():
    script = iter([900, 400, 200, 150, 120, 110, 105, 102, *[100] * 100])
    warmth = profiling.warm_up(lambda: next(script), 60.0)
    assert warmth.settled
    assert warmth.cold_first_ns == 900
    # steps 5 to 12 have the median (102 + 100) / 2, the first within 2 % of the 100 of steps 13 to 20
    assert len(warmth.steps_ns) == 20
    assert next(script) == 100


def test_a_step_that_never_settles_ends_the_warm_up_at_two_hundred_or_in_time():
    counts = iter(range(10_000))
    warmth = profiling.warm_up(lambda: 1000 + 100 * next(counts), 60.0)
    assert (warmth.settled, len(warmth.steps_ns)) == (False, 200)
    clock = iter(range(0, 10_000, 10))
    warmth = profiling.warm_up(lambda: 1000 + 100 * next(counts), 30.0, now=lambda: next(clock))
    assert not warmth.settled
    assert len(warmth.steps_ns) < 10


def timed(phases, reads=()):
    steps = [StepTimes(sum(p.values()) + 5, p, dict.fromkeys(p, 1)) for p in phases]
    return Timed(steps, list(reads))


def test_phases_told_apart_have_times_and_one_never_entered_took_none():
    reads = [{"score": 3000, "attend": 500}] * 5
    rows = profiling.phase_rows(
        timed([{"score": 60, "select": 5, "attend": 30}] * 5, reads), measured(100, "x"), reference=False
    )
    by_name = {row["name"]: row for row in rows}
    assert by_name["score"]["share"] == 0.6
    assert by_name["score"]["gb_per_s"] == 50
    assert by_name["score"]["ceiling_share"] == 0.5
    assert by_name["fallback"]["p50_ms"] == 0
    assert by_name["unattributed"]["share"] == 0.05
    assert by_name["select"]["bytes"] is None
    assert by_name["select"]["bytes_status"] == "not_counted"


def test_a_fused_step_says_that_its_parts_are_not_told_apart_and_moves_all_their_bytes():
    reads = [{"score": 3000, "attend": 500, "page_in": 100, "bound": 20}] * 5
    rows = profiling.phase_rows(timed([{"append": 5, "attend": 90}] * 5, reads), None, reference=False)
    by_name = {row["name"]: row for row in rows}
    assert by_name["attend"]["bytes"] == 3620
    for name in ("score", "select", "rank_check", "page_in", "bound"):
        assert (by_name[name]["share"], by_name[name]["status"]) == (None, "merged")
    assert by_name["fallback"]["share"] == 0
    assert sum(row["share"] for row in rows if row["share"] is not None) == pytest.approx(1)


def test_a_phase_inside_another_has_no_time_of_its_own_and_its_bytes_are_moved_there():
    spent = {"score": 50, "select": 20, "attend": 25}
    steps = [
        StepTimes(100, spent, dict.fromkeys(spent, 1), dict.fromkeys(("rank_check", "page_in"), "select"))
    ]
    reads = [{"score": 3000, "attend": 500, "page_in": 100, "bound": 20}] * 5
    rows = profiling.phase_rows(Timed(steps * 5, reads), None, reference=False)
    by_name = {row["name"]: row for row in rows}
    for name in ("rank_check", "page_in"):
        assert (by_name[name]["share"], by_name[name]["status"]) == (None, "merged")
        assert "select" in by_name[name]["detail"]
    assert (by_name["select"]["share"], by_name["select"]["bytes"]) == (0.2, 100)
    # judged and found sound at once: it was never entered, so it took no time
    assert (by_name["fallback"]["share"], by_name["unattributed"]["share"]) == (0, 0.05)
    assert sum(row["share"] for row in rows if row["share"] is not None) == pytest.approx(1)


def test_layers_are_means_over_the_steps_that_tell_them_apart():
    layers = [[{"append": 1e6, "attend": 3e6}, {"attend": 5e6}], [{"append": 3e6, "attend": 3e6}, {}]]
    steps = [StepTimes(10**7, {}, {}, {}, layer) for layer in (*layers, [], *layers, *layers)]
    found = profiling.layer_rows(Timed(steps, ()), [4, 9])
    assert [row["layer"] for row in found] == [4, 9]
    assert found[0]["steps"] == 6
    assert found[0]["phases_mean_ms"] == {"append": 2, "attend": 3}
    assert found[1]["phases_mean_ms"] == {"attend": 2.5}
    # nearest rank of 4, 6, 4, 6, 4, 6
    assert found[0]["p50_ms"] == 4
    assert profiling.layer_rows(Timed([StepTimes(1, {}, {})], ()), [0]) == []


def test_what_runs_between_two_steps_is_outside_their_time():
    class Arm:
        log = ""

        def step(self, _clock=None):
            self.log += "s"
            return 1000

        def reads(self):
            return None

    arm = Arm()
    profiling.time_phases(arm, CpuClock(), Effort(steps=2), lambda: setattr(arm, "log", arm.log + "e"))
    assert arm.log == "eses"
    arm.log, other = "", Arm()
    effort = Effort(pairs=2, block=5)
    profiling.take_turns(other, arm, effort, (1, 1), lambda: setattr(arm, "log", arm.log + "e"))
    assert (arm.log.count("s"), other.log.count("s"), arm.log.count("e")) == (10, 10, 20)


def test_dense_has_no_certificate_phases():
    rows = profiling.phase_rows(timed([{"model": 80, "append": 5, "attend": 10}] * 5), None, reference=True)
    absent = [row["name"] for row in rows if row["status"] == "not_applicable"]
    assert absent == ["score", "select", "rank_check", "page_in", "bound", "fallback"]


def test_time_is_cut_by_shorter_blocks_first_then_by_fewer_pairs():
    effort = Effort(pairs=12, block=25, pairs_s=30.0)
    assert profiling.plan_pairs(effort, 10_000_000) == (12, 25)
    assert profiling.plan_pairs(effort, 200_000_000) == (12, 12)
    assert profiling.plan_pairs(effort, 1_000_000_000) == (6, 5)
    assert profiling.plan_pairs(effort, 100_000_000_000) == (4, 5)


def test_a_noisy_machine_gets_no_verdict_but_keeps_the_ratio():
    reference, candidate = [[10**8] * 5] * 6, [[5 * 10**7] * 5] * 6
    assert profiling.ratio_record(reference, candidate, "")["ratio"]["verdict"] == "faster"
    noisy = profiling.ratio_record(reference, candidate, "load 7 on 2 cores")
    assert (noisy["ratio"]["verdict"], noisy["ratio"]["reason"]) == ("inconclusive", "load 7 on 2 cores")
    assert noisy["ratio_to_dense"] == pytest.approx(0.5)


def test_growth_is_fitted_over_the_contexts_of_a_mode():
    def cell(ctx, ms):
        phases = [{"name": "model", "share": 0.5}, {"name": "attend", "share": 0.5}]
        return {"mode": "certified", "ctx": ctx, "step_ms": {"p50": ms, "mean": ms}, "phases": phases}

    found = profiling.growth([cell(1024, 1.0), cell(4096, 4.0), cell(16384, 16.0)])
    assert found == [
        {"mode": "certified", "step_exponent": pytest.approx(1), "attention_exponent": pytest.approx(1)}
    ]
    assert profiling.growth([cell(1024, 1.0)]) == []


SHAPES = [(4, 4, 32, torch.float32, 200), (8, 2, 64, torch.bfloat16, 333), (9, 3, 64, torch.float16, 95)]


def storages(root) -> int:
    """Bytes of every distinct tensor storage reachable from an object."""
    seen, stack, found = set(), [root], {}
    while stack:
        thing = stack.pop()
        # a store without originals never fills its spectra: they are empty matrices, not part of the cache
        unused = isinstance(thing, SpectralBound) and not thing.value.any()
        if id(thing) in seen or isinstance(thing, type | str | int | float) or unused:
            continue
        seen.add(id(thing))
        if isinstance(thing, torch.Tensor):
            storage = thing.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
        elif isinstance(thing, dict | list | tuple) or type(thing).__module__.startswith("rcq_cli"):
            stack.extend(gc.get_referents(thing))
    return sum(found.values())


@pytest.mark.parametrize("mode", ["dense", "naive", "certified"])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "dtype", "tokens"), SHAPES)
def test_the_ledger_is_what_is_allocated(mode, heads, kv_heads, dim, dtype, tokens):
    torch.manual_seed(tokens)
    cache = LayerCache(mode, query_heads=heads, kv_heads=kv_heads, head_dim=dim, dtype=dtype)
    cache.prefill(*(torch.randn(kv_heads, tokens, dim).to(dtype) for _ in "kv"))
    entries = ledger.holdings([cache._state])
    counted = sum(entry["bytes"] for entry in entries if entry["tier"] in ("device", "host"))
    held = cache.bytes()
    assert counted == held["device"] + held["host"]
    # naive keeps sixteen bytes a block on the host that its ledger, a device's, leaves out
    assert counted == pytest.approx(storages(cache._state), rel=0.02 if mode == "naive" else 0.01)


def test_what_a_certified_step_reads_follows_from_its_sizes():
    torch.manual_seed(1)
    cache = LayerCache("certified", query_heads=8, kv_heads=2, head_dim=64, skip=False, backend="reference")
    cache.prefill(*(torch.randn(2, 640, 64) for _ in "kv"))
    step = cache.attend(torch.randn(8, 64))
    found = ledger.traffic(cache._state, step)
    blocks = 20
    # one byte a key code, scale and offset in float16 per channel; nothing is open: 640 = 20 * 32
    assert found["score"] == 2 * blocks * (32 * 64 + 2 * 2 * 64)
    assert found["page_in"] == step.certificate.paged_bytes
    promoted = int(step.certificate.promoted_value_blocks[::4].sum())
    # half a byte a value code, range in float16 per token, two marks per group of 16
    assert found["attend"] == (2 * blocks - promoted) * (32 * 32 + 32 * 2 * 2 + 32 * 4 * 2)
    assert ledger.appended(cache._state) == 2 * 2 * 64 * 4 * 2


def test_dense_reads_every_key_and_value_once():
    cache = LayerCache("dense", query_heads=4, kv_heads=2, head_dim=32, dtype=torch.bfloat16)
    cache.prefill(*(torch.randn(2, 100, 32).to(torch.bfloat16) for _ in "kv"))
    step = cache.attend(torch.randn(4, 32).to(torch.bfloat16))
    assert ledger.traffic(cache._state, step) == {"attend": 2 * 2 * 100 * 32 * 2}


def test_a_layer_stepper_times_its_phases_and_feeds_every_token():
    geometry = layer_geometry("smollm2-135m", "float32", "cpu")
    fed = topics(GEOMETRIES["smollm2-135m"], 300, torch.float32)
    cache = LayerCache("certified", query_heads=9, kv_heads=3, head_dim=64)
    cache.prefill(fed.keys[:, :300], fed.values[:, :300])
    arm, clock = LayerStepper(cache._state, fed.keys[:, 300:], fed.values[:, 300:], fed.queries), CpuClock()
    assert geometry.group == 3
    with arm.ready():
        spent = arm.step(clock)
    step = clock.steps()[0]
    assert arm.tokens == 301
    assert step.phase_ns["attend"] > 0
    assert step.step_ns <= spent


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_nothing_but_the_marks_runs_outside_the_phases(backend):
    """Counted in calls: in time, a shared machine would decide how much of a short step the marks are."""
    fed = topics(GEOMETRIES["smollm2-135m"], 300, torch.float32)
    cache = LayerCache("certified", query_heads=9, kv_heads=3, head_dim=64, backend=backend)
    cache.prefill(fed.keys[:, :300], fed.values[:, :300])
    arm = LayerStepper(cache._state, fed.keys[:, 300:], fed.values[:, 300:], fed.queries)
    marks = {phases.__file__, clocks.__file__}
    heard: list[str] = []

    def note(frame, event, _argument):
        if event in ("call", "c_call") and frame.f_code.co_filename not in marks:
            heard.append(frame.f_code.co_name)

    clock = CpuClock(lambda: len(heard))
    with arm.ready():
        arm.step()
        sys.setprofile(note)
        try:
            arm.step(clock)
        finally:
            sys.setprofile(None)
    (step,) = clock.steps()
    assert step.step_ns > 100
    assert step.unattributed_ns < 10


@pytest.mark.parametrize("variant", VARIANTS.values())
def test_every_dense_variant_is_softmax_attention(variant):
    fed = topics(GEOMETRIES["smollm2-135m"], 200, torch.float32)
    keys, values, query = fed.keys[:, :200].double(), fed.values[:, :200].double(), fed.queries[0].double()
    weights = torch.softmax((query.view(3, 3, 64) @ keys.transpose(1, 2)) * 0.125, -1)
    expected = (weights @ values).view(9, 64)
    torch.testing.assert_close(variant(query, keys, values, 0.125), expected)


def test_topics_depend_on_the_seed_alone():
    first, again, other = (topics(GEOMETRIES["qwen2.5-7b"], 64, torch.float32, seed) for seed in (0, 0, 1))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.keys, other.keys)
    assert first.keys.shape == (4, 128, 128)


def test_bandwidth_counts_reads_and_both_sides_of_a_copy(tmp_path):
    found = bandwidth.measure("cpu", repeats=1, bytes_=1 << 22)
    assert {name: str(reading.status) for name, reading in found.items()} == {
        "read_gb_per_s": "ok",
        "copy_gb_per_s": "ok",
    }
    assert bandwidth.last_level_cache(tmp_path).value is None
    (tmp_path / "index3").mkdir()
    (tmp_path / "index3" / "size").write_text("48M\n")
    assert bandwidth.last_level_cache(tmp_path).value == 48 << 20
    assert bandwidth.working_set(measured(48 << 20, "x")) == (192 << 20, "")
    assert bandwidth.working_set(measured(1 << 28, "x"))[1] == "the working set is 2.0 times the cache, not 4"


@pytest.mark.parametrize(
    ("argv", "told"),
    [
        (("--geometry", "llama"), "llama-3.1-8b"),
        (("--geometry", "llama-3.1-8b", "--model", "needle"), "--model has no meaning"),
        (("--mode", "dense", "--mode", "dense"), "given twice"),
        (("--steps", "4"), "5 or more"),
        (("--pairs", "x"), "no whole number"),
        (("--granularity", "head"), "allowed: step, layer"),
        (("--every", "2"), "without --granularity layer"),
        (("--granularity", "layer", "--every", "0"), "1 or more"),
        (("--cache", "hot"), "allowed: warm, cold"),
    ],
)
def test_flags_that_do_not_fit_are_usage_errors(capsys, argv, told):
    assert run(["profile", *argv]) == 2
    assert told in capsys.readouterr().err


def test_a_dry_run_says_what_is_timed(capsys):
    assert run(["profile", "--ctx", "1k,2k", "--geometry", "llama-3.1-8b", "--steps", "9", "--dry-run"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "up to 9 steps by phase and 12 pairs" in out
    assert "niah@2k certified llama-3.1-8b 1 - - -" in out


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize("name", ["nvml", "allocator"])
def test_a_reading_that_a_cpu_cannot_give_is_refused_before_any_work(capsys, monkeypatch, name, dry):
    monkeypatch.setattr("rcq_cli.commands.profile._measure", lambda *_: pytest.fail("measured"))
    assert run(["profile", "--ctx", "512", "--device", "cpu", "--require", name, *dry]) == 7
    assert f"--require {name}" in capsys.readouterr().err


def test_a_required_reading_that_is_null_ends_with_seven():
    cells = [{"memory": {"nvml": {"value": None, "status": "no_driver"}, "vm_hwm_bytes": 5}}]
    _profile.require(cells, ["vm_hwm_bytes"])
    with pytest.raises(Exception, match="nvml") as caught:
        _profile.require(cells, ["nvml"])
    assert caught.value.exit_code == 7
    with pytest.raises(Exception, match="vram"):
        _profile.require([{"memory": {}}], ["vram"])
