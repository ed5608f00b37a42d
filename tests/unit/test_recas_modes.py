import pytest
import torch

import rcq_cli
from rcq_cli.cache.ghosts import GhostStore, encode_ghosts
from rcq_cli.cache.statistics import Collector
from rcq_cli.certify.exact import as_groups, exact_attention
from rcq_cli.errors import BrokenRun, SpecError
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels.reference import BACKEND
from rcq_cli.modes import recas, recas_certified
from rcq_cli.modes._between import glance
from rcq_cli.modes._recas import EVICT_EVERY
from rcq_cli.protocols import Geometry, Needs
from rcq_cli.recas.stages import StageTracker

GEOMETRY = Geometry(4, 2, 32, "float32", "cpu", 32**-0.5)
MODES = {"recas": recas.MODE, "recas-certified": recas_certified.MODE}


def draws(seed):
    generator = torch.Generator().manual_seed(seed)
    return lambda *shape: torch.randn(*shape, generator=generator)


def opened(mode, tokens=600, seed=1, stages=None, offset=0.0, **options):
    """A layer at the end of its prompt, judged by the attention of its last rows, and a source of numbers."""
    normal = draws(seed)
    keys, values, queries = normal(2, tokens, 32), normal(2, tokens, 32) + offset, normal(4, tokens, 32)
    collector = Collector([Needs(last_rows=128)], tokens, GEOMETRY.scale)
    collector.add(queries, keys)
    entry = MODES[mode]
    layer = entry.open(GEOMETRY, entry.Options(**options), BACKEND)
    layer.follow(stages)
    layer.prefill(keys, values)
    layer.end_prefill(collector.result())
    return layer, normal


def run(layer, normal, steps, query=None):
    for _ in range(steps):
        layer.append(normal(2, 32), normal(2, 32))
        yield layer.attend(normal(4, 32) if query is None else query)


def error(layer, query, output):
    return (layer.exact(query) - output.double()).norm(dim=-1)


# -- recas --------------------------------------------------------------------------------------------------


def test_the_budget_holds_and_sinks_and_window_are_kept_and_read():
    layer, normal = opened("recas", keep_tokens=200)
    for i, _ in enumerate(run(layer, normal, 2 * EVICT_EVERY + 5)):
        index = layer.positions.rows.long()
        assert index.shape[1] <= 200 + EVICT_EVERY
        assert (index.diff(dim=1) > 0).all()
        for row in index.tolist():
            assert {0, 1, 2, 3, *range(600 + i + 1 - 128, 600 + i + 1)} <= set(row)
        if layer.active.shape == index.shape:  # nothing was evicted after the step
            assert layer.active[:, :4].all()
            assert layer.active[:, -128:].all()


def test_leaving_the_active_set_never_evicts():
    layer, normal = opened("recas", keep_tokens=300, active_loss=0.5)
    before = None
    for i, _ in enumerate(run(layer, normal, EVICT_EVERY - 1)):
        kept = set(layer.positions.rows[0].tolist())
        assert not layer.active.all()
        assert before is None or before <= kept, i
        before = kept


def test_reading_everything_that_is_kept_is_attention_on_the_kept_tokens():
    layer, normal = opened("recas", keep_tokens=200, active_loss=0.0, adapt=False)
    query = normal(4, 32)
    for step in run(layer, normal, 1, query):
        keys, values = (slab.rows for slab in layer.kept)
        expected = exact_attention(as_groups(query, 2), keys, values, GEOMETRY.scale).output.flatten(0, 1)
        assert torch.allclose(step.output.double(), expected, atol=1e-6)


def test_a_budget_for_all_tokens_that_reads_them_all_is_dense():
    layer, normal = opened("recas", keep_tokens=5000, active_loss=0.0)
    query = normal(4, 32)
    for step in run(layer, normal, 3, query):
        assert error(layer, query, step.output).max() < 1e-6
    assert layer.engagement().reason == "budget_ge_context"


def test_a_linked_unit_survives_eviction_without_any_attention():
    stages = StageTracker()
    stages.read(range(600))
    stages.credit(torch.arange(320, 336).numpy())
    layer, _ = opened("recas", stages=stages, keep_tokens=160, lexicographic=True)
    assert set(range(320, 336)) <= set(layer.positions.rows[0].tolist())
    plain, _ = opened("recas", keep_tokens=160, lexicographic=True)
    assert not set(range(320, 336)) <= set(plain.positions.rows[0].tolist())


def test_probes_measure_the_mass_that_was_not_read():
    layer, normal = opened("recas", keep_tokens=200, probe_rate=1.0, adapt=False)
    query = normal(4, 32)
    for _ in run(layer, normal, 1, query):
        keys = layer.originals[0].rows.double()
        mass = ((as_groups(query, 2) @ keys.transpose(1, 2)) * GEOMETRY.scale).softmax(-1)
        for head in range(2):
            read = torch.zeros(601, dtype=torch.bool)
            read[layer.positions.rows[head].long()[layer.active[head]]] = True
            expected = float(mass[head][:, ~read].sum(-1).max())
            assert layer.last_mass[head] == pytest.approx(expected, rel=1e-9)
    assert layer.engagement().details["estimate_probes"] == 1


def test_a_calibrated_estimate_that_is_too_large_brings_tokens_back():
    layer, normal = opened("recas", keep_tokens=150, probe_rate=1.0, eps=0.2)
    first = layer.positions.length
    outputs = []
    for _ in range(40):
        query = normal(4, 32)
        layer.append(normal(2, 32), normal(2, 32))
        outputs.append(error(layer, query, layer.attend(query).output))
    # diffuse attention loses far more than the budget allows: everything comes back or is read
    assert layer.positions.length > first + 100
    assert layer.controller.budget > 150
    held, _ = opened("recas", keep_tokens=150, probe_rate=1.0, eps=0.2, adapt=False)
    for _ in run(held, normal, 40):
        pass
    assert held.controller.budget == 150


def test_the_calibrated_estimate_covers_its_share_of_probes():
    layer, normal = opened("recas", keep_tokens=300, probe_rate=1.0, adapt=False)
    for _ in run(layer, normal, 150):
        pass
    details = layer.engagement().details
    assert details["estimate_probes"] == 150
    assert details["estimate_tested"] >= 100
    assert details["estimate_misses"] / 150 <= 0.1 + (0.1 + 0.02) / (0.02 * 150)


def test_without_prompt_statistics_the_first_query_judges():
    cache = rcq_cli.LayerCache(
        "recas", query_heads=4, kv_heads=2, head_dim=32, dtype=torch.float32, keep_tokens=150
    )
    normal = draws(3)
    cache.prefill(normal(2, 500, 32), normal(2, 500, 32))
    cache.append(normal(2, 32), normal(2, 32))
    step = cache.attend(normal(4, 32))
    assert step.certificate is None
    assert cache._state.positions.length == 150


def test_a_fork_goes_its_own_way():
    layer, normal = opened("recas", keep_tokens=200)
    twin = layer.fork()
    before = layer.positions.rows.clone()
    for _ in run(twin, normal, EVICT_EVERY + 3):
        pass
    assert torch.equal(layer.positions.rows, before)
    assert (layer.tokens, twin.tokens) == (600, 600 + EVICT_EVERY + 3)


@pytest.mark.parametrize(
    "options", [{"keep_tokens": 100}, {"alpha": -1.0}, {"window": 0}, {"miss_rate": 0.0}, {"eps": 0.0}]
)
def test_options_out_of_range_are_refused(options):
    with pytest.raises(SpecError, match="not allowed"):
        recas.Options(**options)


# -- recas-certified ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("eps", [0.02, 0.1])
def test_every_step_is_certified_within_eps_or_exact_and_no_bound_is_violated(eps):
    layer, normal = opened("recas-certified", keep_tokens=200, eps=eps)
    for _ in range(12):
        query = 2 * normal(4, 32)
        layer.append(normal(2, 32), normal(2, 32))
        step = layer.attend(query)
        found, truth = step.certificate, layer.exact(query).norm(dim=-1)
        wrong = error(layer, query, step.output)
        assert (wrong <= found.total_bound).all()
        assert (wrong <= eps * truth).all()
        assert (found.exact | (found.total_bound <= found.output_norm * eps / (1 + eps))).all()


def test_a_dropped_block_that_wakes_up_is_brought_back_and_certified():
    layer, normal = opened("recas-certified", keep_tokens=200, explore=0.0)
    ghost = int((~layer.cache.at_hand()).all(0).nonzero()[0])
    key = layer.cache.originals[0].rows[:, ghost * 32 + 7]
    query = 8 * key.repeat_interleave(2, 0)
    layer.append(normal(2, 32), normal(2, 32))
    step = layer.attend(query)
    mass = torch.softmax(as_groups(query, 2) @ layer.cache.originals[0].rows.double().mT / 32**0.5, -1)
    assert mass[..., ghost * 32 + 7].min() > 0.5
    wrong = error(layer, query, step.output)
    assert (wrong <= step.certificate.total_bound).all()
    assert (wrong <= 0.05 * layer.exact(query).norm(dim=-1)).all()
    assert layer.cache.at_hand()[:, ghost].all()
    assert layer.engagement().details["readmitted_blocks"] > 0


def test_what_is_dropped_has_its_share_of_the_certificate():
    layer, normal = opened("recas-certified", tokens=1000, keep_tokens=500, eps=0.3, offset=3.0)
    steps = list(run(layer, normal, 3))
    assert max(float(step.certificate.dropped_bound.max()) for step in steps) > 0
    assert not layer.cache.at_hand().all()


def test_ghosts_hold_no_values_and_come_back_as_they_were():
    normal = draws(5)
    store = GhostStore(GEOMETRY, TierFormat(16, 16, "float16", "two-level"), BACKEND)
    store.extend(normal(2, 330, 32), normal(2, 330, 32))
    whole = store.bytes().device
    every = torch.arange(20).repeat(2), torch.arange(2).repeat_interleave(20)
    before = {name: rows.clone() for name, rows in store.pick(every[1], every[0]).items()}
    chosen = torch.zeros(2, 20, dtype=torch.bool)
    chosen[0, 2:9], chosen[1, 11:18] = True, True
    twin = store.fork()
    store.keep(chosen)
    assert torch.equal(store.at_hand(), chosen)
    per_block = sum(slab.data[0, 0].nbytes for name, slab in twin.blocks.items() if name.startswith("value_"))
    assert whole - store.bytes().device == 2 * 13 * per_block
    assert twin.at_hand().all()
    head, block = chosen.nonzero(as_tuple=True)
    for name, rows in store.pick(head, block).items():
        assert torch.equal(rows, before[name].unflatten(0, (2, 20))[head, block]), name
    assert not store.damaged(head, block).any()
    store.extend(normal(2, 40, 32), normal(2, 40, 32))
    assert store.at_hand()[:, 20:].all()
    store.keep(torch.ones_like(store.at_hand()))
    for name, rows in store.pick(every[1], every[0]).items():
        assert torch.equal(rows, before[name]), name
    assert not store.damaged(every[1], every[0]).any()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_dropped_mass_lies_within_its_proven_limits(bits):
    options = {"tokens": 1000, "keep_tokens": 300, "eps": 0.3, "offset": 3.0, "ghost_bits": bits}
    layer, normal = opened("recas-certified", **options)
    ratios = []
    for _ in range(6):
        query = 1.5 * normal(4, 32)
        layer.append(normal(2, 32), normal(2, 32) + 3)
        found = layer.attend(query).certificate
        keys = layer.cache.originals[0].rows.double()
        mass = torch.softmax(as_groups(query, 2) @ keys.mT / 32**0.5, -1)
        read = torch.ones(2, layer.tokens, dtype=torch.bool)
        read[:, : 32 * layer.read.shape[1]] = layer.read.repeat_interleave(32, 1)
        lost = torch.where(read[:, None], 0.0, mass).sum(-1).flatten()
        lost = torch.where(found.exact, 0.0, lost)
        low, high = (found.reported[name] for name in recas_certified.DROPPED)
        assert (low <= lost + 1e-15).all()
        assert (lost <= high).all()
        ratios += (high / lost)[lost > 0].tolist()
    assert ratios
    assert sorted(ratios)[len(ratios) // 2] <= (1.2 if bits == 8 else 4.0)


def test_between_certified_steps_nothing_is_claimed_until_an_estimate_is_calibrated():
    options = {
        "tokens": 800,
        "keep_tokens": 600,
        "eps": 0.3,
        "offset": 3.0,
        "cert_every": 8,
        "probe_rate": 0.4,
    }
    layer, normal = opened("recas-certified", **options)
    kinds, wrong = [], []
    for _ in range(90):
        query = normal(4, 32)
        layer.append(normal(2, 32), normal(2, 32) + 3)
        ready = layer.schedule.calibrator.ready
        step = layer.attend(query)
        kinds.append((ready, layer.schedule.random, step.certificate is not None))
        wrong.append(float((error(layer, query, step.output) / layer.exact(query).norm(dim=-1)).max()))
        if step.certificate is not None:
            assert (error(layer, query, step.output) <= step.certificate.total_bound).all()
    for number, (ready, random, certified) in enumerate(kinds):
        assert certified == (number % 8 == 0 or random or not ready), number
    between = [not certified for _, _, certified in kinds]
    assert sum(between) > 20
    assert max(wrong) <= 0.3
    details = layer.engagement().details
    assert details["uncertified_steps"] == sum(between)
    assert details["estimate_probes"] == sum(random for _, random, _ in kinds)
    every, _ = opened("recas-certified")
    assert "estimate_probes" not in every.engagement().details


def test_a_step_without_ghosts_reads_what_is_at_hand_and_its_mass_is_measured_by_the_certified_ones():
    options = {"tokens": 1000, "keep_tokens": 300, "eps": 0.9, "cert_every": 1000, "probe_rate": 1.0}
    layer, normal = opened("recas-certified", **options)
    for _ in range(3):
        query = normal(4, 32)
        layer.append(normal(2, 32), normal(2, 32))
        held = torch.ones(2, layer.tokens, dtype=torch.bool)
        blocks = layer.cache.at_hand()
        held[:, : 32 * blocks.shape[1]] = blocks.repeat_interleave(32, 1)
        seen = glance(layer.cache, as_groups(query, 2))
        keys, values = (slab.rows.double() for slab in layer.cache.originals)
        scores = as_groups(query, 2) @ keys.mT / 32**0.5
        kept = torch.where(held[:, None], scores, -torch.inf).softmax(-1)
        # codes of 8 and 4 bits, so the agreement is one of figures, not of bits
        assert (seen.output - kept @ values).norm() <= 0.1 * (kept @ values).norm()
        assert [sorted(row) for row in seen.tokens.tolist()] == [h.nonzero()[:, 0].tolist() for h in held]
        layer.attend(query)
        lost = torch.where(held[:, None], 0.0, scores.softmax(-1)).sum(-1).amax(1)
        found = torch.tensor(layer.schedule.last_mass)
        assert (lost <= found).all()
        assert (found <= 1.3 * lost).all()


def test_int4_ghosts_are_certified_brought_back_and_smaller():
    options = {"tokens": 1000, "keep_tokens": 300, "offset": 3.0, "eps": 0.3}
    layer, normal = opened("recas-certified", ghost_bits=4, **options)
    wide, _ = opened("recas-certified", **options)
    assert layer.bytes().device < wide.bytes().device
    ghost = int((~layer.cache.at_hand()).all(0).nonzero()[0])
    query = 8 * layer.cache.originals[0].rows[:, ghost * 32 + 7].repeat_interleave(2, 0)
    for asked in (query, normal(4, 32), normal(4, 32)):
        layer.append(normal(2, 32), normal(2, 32) + 3)
        step = layer.attend(asked)
        wrong = error(layer, asked, step.output)
        assert (wrong <= step.certificate.total_bound).all()
        assert (wrong <= 0.3 * layer.exact(asked).norm(dim=-1)).all()
        if asked is query:
            assert layer.cache.at_hand()[:, ghost].all()
    layer.check_intact()


def test_a_damaged_int4_ghost_is_found():
    layer, _ = opened("recas-certified", tokens=1000, keep_tokens=300, ghost_bits=4)
    layer.check_intact()
    layer.cache.ghosts["ghost_codes"][0, 0, 0, 0] ^= 1
    with pytest.raises(BrokenRun, match="damaged"):
        layer.check_intact()


def test_int4_codes_stay_within_half_a_step_and_their_notes_cover_them():
    normal = draws(9)
    keys = normal(40, 16, 32).double() * torch.logspace(-3, 3, 40)[:, None, None] + 5
    keys[3], keys[4, :, 5] = 2.5, -1e3
    rows, bad = encode_ghosts(keys, TierFormat(16, 16, "float16", "two-level"))
    assert not bad.any()
    packed = rows["ghost_codes"]
    codes = torch.stack((packed & 15, packed >> 4), -1).flatten(-2).double() - 8
    scale, offset = rows["ghost_scale"].double()[:, None], rows["ghost_offset"].double()[:, None]
    away = (keys - codes * scale - offset).abs()
    assert (away <= scale / 2 * (1 + 2.0**-14)).all()
    stated = rows["ghost_notes"].double()
    assert (away.norm(dim=-1).amax(-1) <= stated[:, 0]).all()
    together = torch.linalg.matrix_norm(keys - codes * scale - offset, 2)
    assert (together <= stated[:, 2]).all()
    assert (stated[:, 2] <= together * 1.05 + 1e-6).all()
    spread = (keys.amax(1) - keys.amin(1)) / 15
    assert ((scale[:, 0] <= spread * 1.01 + 2.0**-23) | (offset[:, 0].abs() > 8 * spread)).all()
    assert encode_ghosts(keys * 1e9, TierFormat(16, 16, "float16", "two-level"))[1].any()


def test_a_store_with_int4_ghosts_scores_every_block_and_gives_back_what_it_gave_up():
    normal = draws(5)
    store = GhostStore(GEOMETRY, TierFormat(16, 16, "float16", "two-level"), BACKEND, ghost_bits=4)
    store.extend(normal(2, 330, 32), normal(2, 330, 32))
    head, block = torch.arange(2).repeat_interleave(20), torch.arange(20).repeat(2)
    before = {name: rows.clone() for name, rows in store.pick(head, block).items()}
    chosen = torch.zeros(2, 20, dtype=torch.bool)
    chosen[0, 2:9], chosen[1, 11:18] = True, True
    store.keep(chosen)
    query = normal(2, 3, 32).double()
    exact = query @ store.originals[0].rows[:, :320].double().mT
    for fresh in (0, 40, 0):
        store.extend(normal(2, fresh, 32), normal(2, fresh, 32))
        scores = store.backend.score_blocks(query, store.codes())[:, :, :20].flatten(2)
        allowed = store.backend.half_steps(query, store.codes())[:, :, :20].repeat_interleave(16, 2)
        assert ((scores - exact).abs() <= allowed * (1 + 1e-9)).all()
        reach = query.norm(dim=-1)[..., None] * store.bounds().rk[:, None, :20].repeat_interleave(16, 2)
        assert ((scores - exact).abs() <= reach * (1 + 1e-9)).all()
    assert not store.changed_blocks(0).any()
    twin = store.fork()
    twin.keep(torch.ones_like(twin.at_hand()))
    for name, rows in twin.pick(head, block).items():
        assert torch.equal(rows, before[name]), name
    assert not store.at_hand()[:, :20].all()


def test_both_modes_save_device_memory_and_say_so():
    for mode in MODES:
        layer, normal = opened(mode, tokens=1000, keep_tokens=340)
        for _ in run(layer, normal, 2):
            pass
        held = layer.bytes()
        assert held.device < held.dense_equivalent * (0.8 if mode == "recas" else 0.6)
        record = layer.engagement()
        assert record.engaged
        assert record.evicted_tokens > 0


# -- what a cell says of estimates --------------------------------------------------------------------------


def test_the_coverage_interval_is_the_exact_one():
    from scipy.stats import binomtest

    from rcq_cli.stats import clopper_pearson

    for right, n in [(0, 5), (5, 5), (3, 10), (180, 200), (1, 1000)]:
        exact = binomtest(right, n).proportion_ci(method="exact")
        assert clopper_pearson(right, n) == pytest.approx((exact.low, exact.high), abs=1e-9)


def test_a_cell_keeps_estimates_apart_from_certificates():
    from rcq_cli.records import _estimates

    rows = [
        {"engaged": {"estimate_probes": 30, "estimate_misses": 2, "estimate_tested": 12}},
        {"engaged": {"estimate_probes": 10, "estimate_misses": 2, "estimate_tested": 3}},
    ]
    found = _estimates(rows)["estimates"]
    assert (found["label"], found["probes"], found["tested"], found["coverage"]) == (
        "calibrated",
        40,
        15,
        0.9,
    )
    assert found["coverage_ci"][0] < 0.9 < found["coverage_ci"][1]
    assert _estimates([{"engaged": {"engaged": True}}]) == {}
    none = _estimates([{"engaged": {"estimate_probes": 0, "estimate_misses": 0, "estimate_tested": 0}}])
    assert (none["estimates"]["label"], none["estimates"]["coverage"]) == ("none", None)


@pytest.mark.parametrize("tokens", [1, 5, 31])
def test_steps_between_certified_ones_need_no_completed_block(tokens):
    layer, normal = opened("recas-certified", tokens=tokens, cert_every=4)
    for step in run(layer, normal, 36):
        assert bool(torch.isfinite(step.output).all())


@pytest.mark.parametrize("tokens", [1, 5, 31])
def test_a_glance_at_the_open_tail_alone_is_exact(tokens):
    layer, normal = opened("recas-certified", tokens=tokens)
    query = normal(2, 2, 32).double()
    keys, values = (slab.rows for slab in layer.cache.originals)
    expected = exact_attention(query, keys, values, GEOMETRY.scale).output
    torch.testing.assert_close(glance(layer.cache, query).output, expected)
