"""Compiled steps over ghosts: every piece against the function that defines it, and whole layers in turns."""

import math

import pytest
import torch

from rcq_cli.cache.ghosts import GhostStore
from rcq_cli.certify import bounds as proven
from rcq_cli.certify.exact import score_slack
from rcq_cli.certify.ladder import CertifiedStep, _share
from rcq_cli.certify.spectral import theta
from rcq_cli.errors import BrokenRun
from rcq_cli.kernels import _cpu_float64, _cpu_float64_blocks, _cpu_float64_bounds, _cpu_float64_kept
from rcq_cli.kernels._format import TierFormat
from rcq_cli.kernels.cpu import Cpu
from rcq_cli.kernels.reference import Reference
from rcq_cli.modes import recas_certified
from rcq_cli.modes._compiled import _slack_terms
from rcq_cli.modes._ghost_step import CompiledGhosts, CompiledGhostStep, GhostStep, open_store
from rcq_cli.protocols import Geometry
from rcq_cli.recas.joint import dropped_interval
from tests.unit.float64_pieces import (
    DIM,
    GROUP,
    HEADS,
    KINDS,
    MASSES,
    SCALE,
    SIZE,
    ULP,
    UNDERFLOW,
    fill,
    masses_of,
    prove,
    rows,
    weights_of,
    widest,
)

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def chance(*shape, share, seed):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < share


def stores(kind="random", tokens=118, dtype=torch.float32, group=16, dropped=True):
    """The same tokens in the plain store and in the compiled one, some blocks dropped."""
    if kind == "raw" and dtype == torch.float16:
        pytest.skip("float16 cannot hold what float16 metadata cannot")
    name = str(dtype).removeprefix("torch.")
    geometry = Geometry(HEADS * GROUP, HEADS, DIM, name, "cpu", SCALE)
    fmt = TierFormat(SIZE, group, "float16", "two-level")
    pair = GhostStore(geometry, fmt, Reference()), CompiledGhosts(geometry, fmt, Cpu())
    fill(pair, kind, tokens, dtype)
    for store in pair:
        if dropped and store.block_count:
            store.keep(kept(store.block_count))
    return pair


def kept(count):
    """Every second block, others in either head."""
    block = torch.arange(count - count % 2)
    chosen = torch.zeros(HEADS, count, dtype=torch.bool)
    chosen[0, block], chosen[1, block] = block % 2 == 0, block % 2 == 1
    return chosen


# -- pieces that read what is stored ------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [7, 112, 127])
def test_ghosts_are_scored_like_all_others(kind, dtype, tokens):
    plain, store = stores(kind, tokens, dtype)
    query, notes = rows(HEADS, GROUP, DIM, seed=5), plain.bounds()
    found, fine = _cpu_float64.score(
        query, SCALE, store.layer(), (notes.rk, notes.kappa, notes.sk), SIZE, store.tail_places()[0],
        store.tail_tokens, _slack_terms(DIM, SCALE),
    )  # fmt: skip
    assert fine
    norm = query.norm(dim=-1)[..., None] * proven.MARGIN
    slack = score_slack(norm, (notes.kappa + notes.rk)[:, None], SCALE, DIM)
    torch.testing.assert_close(found.slack, slack, **ULP)
    if tokens >= SIZE:
        codes = plain.codes()
        coded = Reference().score_blocks(query, codes) * SCALE
        torch.testing.assert_close(found.scores[:, :, :-1], coded, rtol=1e-12, atol=1e-11)
        half = Reference().half_steps(query, codes)
        torch.testing.assert_close(found.half_step[..., :-1], half, **ULP)
        reach = torch.minimum(half, norm * notes.rk[:, None, :-1]) * (SCALE * proven.MARGIN)
        delta = reach + slack[..., :-1]
        torch.testing.assert_close(found.delta[..., :-1], delta, **ULP)
        wide = proven.breadth(delta, slack[..., :-1], (norm * notes.sk[:, None] * SCALE)[..., :-1], SIZE)
        torch.testing.assert_close(found.wide[..., :-1], wide, **ULP)
        assert kind != "random" or bool((wide < SIZE**0.5).any())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [16, 32])
def test_sums_by_block_come_from_codes_originals_and_the_tail(kind, dtype, group):
    plain, store = stores(kind, dtype=dtype, group=group)
    count = store.block_count
    weights = rows(HEADS, GROUP, count + 1, SIZE).abs()
    weights[:, :, -1, store.tail_tokens :] = 0.0
    exact = ~store.at_hand() | store.raw.rows | chance(HEADS, count, share=0.3, seed=3)
    chosen = chance(HEADS, count, share=0.7, seed=4)
    sums = torch.full((HEADS, GROUP, count + 1, DIM), 7.0, dtype=torch.float64)
    tail = store.tail_places()[1], store.tail_tokens
    reading = _cpu_float64_kept.Reading(chosen, exact)
    changed = _cpu_float64_kept.sum_blocks(weights, store.layer(), reading, group, tail, sums)
    assert not bool(changed.any())
    expected = torch.full_like(sums, 7.0)
    for h, b in chosen.nonzero().tolist():
        at = torch.tensor([h]), torch.tensor([b])
        if exact[h, b]:
            values = plain.original_blocks(*at)[1].double()
        else:
            values = Reference().values(plain.pick(*at))
        expected[h, :, b] = weights[h, :, b] @ values[0]
    expected[:, :, -1] = weights[:, :, -1, : store.tail_tokens] @ plain.tail_rows()[1]
    torch.testing.assert_close(sums, expected, rtol=1e-11, atol=1e-11)
    none = _cpu_float64_kept.Reading(torch.zeros_like(chosen), exact)
    _cpu_float64_kept.sum_blocks(weights * 2, store.layer(), none, group, (tail[0], 0), sums)
    torch.testing.assert_close(sums, expected, rtol=1e-11, atol=1e-11)


def test_originals_that_changed_are_seen_when_they_are_summed():
    _, store = stores()
    store.originals[1].data[0, 5 * SIZE + 15, DIM - 1] += 1
    count = store.block_count
    every = torch.ones(HEADS, count, dtype=torch.bool)
    shape = HEADS, GROUP, count + 1
    changed = _cpu_float64_kept.sum_blocks(
        rows(*shape, SIZE), store.layer(), _cpu_float64_kept.Reading(every, every), 16,
        (store.tail_places()[1], 0), rows(*shape, DIM),
    )  # fmt: skip
    assert changed.nonzero().tolist() == [[0, 5]]


@pytest.mark.parametrize("name", ["key_codes", "value_codes", "value_marks", "annotations"])
def test_a_block_at_hand_is_checked_where_it_lies(name):
    """Block 2 of head 0 is the second one that is held, block 3 is a ghost."""
    _, store = stores()
    slab = store.annotations if name == "annotations" else store.blocks[name]
    slab.data[0, 1 if name.startswith("value_") else 2].flatten().view(torch.uint8)[-1] ^= 1
    pairs = torch.tensor([0, 0, 0, 1]), torch.tensor([0, 2, 3, 1])
    assert store.damaged(*pairs).tolist() == [False, True, False, False]
    query = rows(HEADS, GROUP, DIM, seed=5)
    scores = rows(HEADS, GROUP, store.block_count + 1, SIZE)
    limit = torch.full((HEADS, GROUP, store.block_count), 1e9, dtype=torch.float64)
    take = torch.ones(4, dtype=torch.bool)
    found = _cpu_float64.promote(query, SCALE, store.layer(), pairs, take, limit, scores)
    assert found.unlike.tolist() == [False, True, False, False]


# -- pieces over blocks -------------------------------------------------------------------------------------


READ = (0.1, 0.6, 1.0)


def weighed(kind, share):
    """Masses of which a share was read, compiled and in the terms of `rcq_cli.certify.bounds`."""
    read = chance(HEADS, 40, share=share, seed=11)
    read[:, 20] = True  # the heaviest token of `one token`
    values = rows(HEADS, 41, seed=6).abs(), torch.zeros(HEADS, 40, dtype=torch.bool)
    tail = 0 if kind == "no tail" else 4
    found = _cpu_float64_bounds.weighed(masses_of(kind), read, values, (SIZE, tail), UNDERFLOW)
    skipped = torch.cat((~read, torch.zeros(HEADS, 1, dtype=torch.bool)), 1)[:, None]
    return found, read, proven.Masses(*found[:3], skipped.expand_as(found.share), found.log_peak)


@pytest.mark.parametrize("kind", MASSES)
@pytest.mark.parametrize("share", READ)
def test_masses_are_relative_to_what_was_read(kind, share):
    peak, mass, square = masses_of(kind)
    found, _, masses = weighed(kind, share)
    active = torch.where(masses.skipped, -torch.inf, peak + mass.log())
    total = active.logsumexp(-1, keepdim=True)
    torch.testing.assert_close(found.log_weight, peak + mass.log() - total, **ULP)
    torch.testing.assert_close(found.share * mass, (active - total).exp(), **ULP)
    log_square = square.log() + 2 * (peak - total)
    torch.testing.assert_close(found.log_square, log_square, rtol=1e-12, atol=1e-12)
    top = torch.where(masses.skipped, -torch.inf, peak).amax(-1, keepdim=True)
    torch.testing.assert_close(found.total, (total - top).exp()[..., 0], **ULP)
    tokens = torch.full((41,), 16.0).double()
    tokens[-1] = 0 if kind == "no tail" else 4
    flushed = tokens.log() + (peak - top).clamp_max(math.log(UNDERFLOW)) - (total - top)
    torch.testing.assert_close(found.log_flushed, flushed, **ULP)


@pytest.mark.parametrize("kind", MASSES)
@pytest.mark.parametrize("share", [0.0, 0.5, 0.95, 0.999])
def test_the_heaviest_blocks_are_those_of_the_ladder(kind, share):
    peak, mass, _ = masses_of(kind)
    step = CertifiedStep.__new__(CertifiedStep)
    step.peak, step.mass, step.blocks = peak, mass, 40
    step.read = torch.zeros(HEADS, 40, dtype=torch.bool)
    expected = step._heaviest(share)
    assert torch.equal(_cpu_float64_blocks.heaviest(peak + mass.log(), share), expected)


@pytest.mark.parametrize("levels", [2, 1000])
def test_the_dearest_blocks_are_those_of_the_ladder(levels):
    for seed in range(10):
        noise = torch.Generator().manual_seed(seed)
        cost = torch.randint(levels, (HEADS, GROUP, 40), generator=noise).double() / levels
        cost[0, 0, 5] = torch.inf
        allowance = torch.rand(HEADS, GROUP, generator=noise).double() * 20
        allowance[1, 2] = torch.inf
        expected = CertifiedStep._dearest(cost, allowance)
        assert torch.equal(_cpu_float64_blocks.dearest(cost, allowance), expected)


@pytest.mark.parametrize("kind", MASSES)
@pytest.mark.parametrize("share", [0.0, *READ])
@pytest.mark.parametrize("delta", [1e-9, 0.02, 60.0, 800.0])
def test_limits_of_the_mass_outside_are_those_that_are_proven(kind, share, delta):
    found, _, masses = weighed(kind, 0.6)
    outside, exact = (chance(HEADS, 40, share=part, seed=17) for part in (share, 0.5))
    slack = rows(HEADS, GROUP, 41, seed=21).abs() * 1e-12
    coded = rows(HEADS, GROUP, 41, seed=22).abs() * delta + slack
    tail = torch.zeros(HEADS, 1, dtype=torch.bool)
    errors = torch.where(torch.cat((exact, ~tail), 1)[:, None], slack, coded)
    skipped = torch.cat((outside, tail), 1)[:, None].expand_as(masses.skipped)
    low, high = dropped_interval(masses._replace(skipped=skipped), errors)
    mine = _cpu_float64_bounds.limits(found, outside, (slack, coded), exact)
    torch.testing.assert_close(mine[0], low, rtol=1e-10, atol=1e-300)
    torch.testing.assert_close(mine[1], high, rtol=1e-10, atol=1e-300)


@pytest.mark.parametrize("kind", MASSES)
def test_attention_of_all_tokens_is_their_softmax(kind):
    scores, weights, (peak, mass, _) = weights_of(kind)
    tokens = 40 * SIZE + (0 if kind == "no tail" else 4)
    found = _cpu_float64_kept.attention(weights, peak, mass, tokens)
    expected = scores.flatten(2)[..., :tokens].softmax(-1).mean(1)
    torch.testing.assert_close(found, expected, **ULP)


@pytest.mark.parametrize("kind", MASSES)
@pytest.mark.parametrize("share", READ)
@pytest.mark.parametrize("delta", [1e-9, 0.02, 1.5, 60.0, 800.0])
@pytest.mark.parametrize("limit", [0.0, math.inf])
def test_bounds_with_skipped_blocks_are_those_that_are_proven(kind, share, delta, limit):
    found, read, masses = weighed(kind, share)
    positive = {
        name: rows(HEADS, 41, seed=seed).abs()
        for name, seed in (("eta", 6), ("radius", 31), ("residual_joint", 34), ("joint", 35))
    }
    positive["eta"][:, -1] = 0.0
    wide = rows(HEADS, GROUP, 41, seed=36).abs() * 2
    spectra = rows(2, HEADS, seed=33).abs() * 9
    spread = _cpu_float64_bounds.Spread(*positive.values(), rows(HEADS, DIM, seed=3), *spectra)
    keys, values = (chance(HEADS, 40, share=0.5, seed=seed) for seed in (41, 42))
    slack = rows(HEADS, GROUP, 41, seed=21).abs() * 1e-12 + 1e-12
    coded = rows(HEADS, GROUP, 41, seed=22).abs() * delta + slack
    output, storing = rows(HEADS, GROUP, DIM, seed=4), rows(HEADS, GROUP, seed=5).abs() * 1e-7
    outputs = output, output + 1e-7, storing
    tokens = 644
    relative = theta(tokens + 24 + 16 * math.sqrt(DIM), 2.0**-53)
    mine = _cpu_float64_bounds.bounds(
        found, spread, (slack, coded, wide), (keys, values, read), outputs,
        torch.full((HEADS, GROUP), limit, dtype=torch.float64),
        (relative, 2.0**-53, math.sqrt(DIM) * tokens * UNDERFLOW),
    )  # fmt: skip
    theirs = prove(masses, found.total, spread, (slack, coded, wide), keys, values, outputs, tokens)
    radius, terms, offset = spread.radius[:, None], theirs.terms, theirs.away + theirs.value
    joint = spread.joint[:, None].expand_as(terms.cw)
    contribution = proven.key_shares(terms, radius, offset, joint) / terms.z_low[..., None]
    dropped = theirs.key * _share(contribution, masses.skipped)
    close = {"rtol": 1e-9, "atol": 1e-13}
    torch.testing.assert_close(mine.value, theirs.value, **close)
    torch.testing.assert_close(mine.rounding, theirs.rounding, **close)
    torch.testing.assert_close(mine.key + mine.dropped, theirs.key, **close)
    torch.testing.assert_close(mine.dropped, dropped, **close)
    torch.testing.assert_close(mine.contribution, contribution, **close)
    for ours, other in ((mine.key_split, theirs.key_split), (mine.value_split, theirs.value_split)):
        assert torch.equal(ours.order, other.order)
        torch.testing.assert_close(ours.prefix, other.prefix, **close)
        torch.testing.assert_close(ours.rest, other.rest, **close)
    calm = proven.key_terms(masses._replace(skipped=torch.zeros_like(masses.skipped)), slack)
    spectrum = spread.spectrum[:, None].expand(-1, GROUP)
    floor = proven.key_split(calm, radius.expand_as(calm.cw), theirs.away, spectrum, joint).value()
    floor = torch.minimum(floor, widest(spread, calm))
    torch.testing.assert_close(mine.floor, floor if limit == 0 else torch.zeros_like(floor), **close)


# -- whole layers -------------------------------------------------------------------------------------------


def layers(dtype=torch.float32, tokens=440, kind="plain", **options):
    """The same prompt under the reference and under the compiled pieces."""
    keys, values = rows(HEADS, tokens, DIM, seed=1), rows(HEADS, tokens, DIM, seed=2)
    if kind == "offset":
        values += 3
    if kind == "outlier":
        keys[:, :, 3] *= 20
        values[:, ::7] *= 20
    if kind == "raw":
        values[0, 100:104] *= 1e5
    name = str(dtype).removeprefix("torch.")
    geometry = Geometry(HEADS * GROUP, HEADS, DIM, name, "cpu", DIM**-0.5)
    chosen = recas_certified.Options(**{"keep_tokens": 220, "block": 16, **options})
    pair = [recas_certified.MODE.open(geometry, chosen, backend) for backend in (Reference(), Cpu())]
    for layer in pair:
        layer.prefill(keys.to(dtype), values.to(dtype))
    return pair


@pytest.mark.parametrize(
    ("kind", "dtype", "options"),
    [
        ("plain", torch.float32, {}),
        ("plain", torch.bfloat16, {"eps": 0.9}),
        ("offset", torch.float32, {"eps": 0.3, "explore": 0.2}),
        ("outlier", torch.float16, {"eps": 0.002}),
        ("raw", torch.float32, {"denominator": "layer", "group": 32}),
    ],
)
def test_both_pairings_drop_promote_and_bring_back_the_same_blocks(kind, dtype, options):
    plain, compiled = layers(dtype, kind=kind, **options)
    assert (plain.step, compiled.step) == (GhostStep, CompiledGhostStep)
    for number in range(70):  # evicts once while it decodes
        key, value = (rows(HEADS, DIM, seed=1000 + number + i).to(dtype) for i in (0, 500))
        query = (1.5 * rows(HEADS * GROUP, DIM, seed=3000 + number)).to(dtype)
        steps = []
        for layer in (plain, compiled):
            layer.append(key, value + 3 if kind == "offset" else value)
            steps.append(layer.attend(query))
        assert torch.equal(plain.cache.at_hand(), compiled.cache.at_hand()), number
        assert torch.equal(plain.read, compiled.read), number
        ours, theirs = steps[1].certificate, steps[0].certificate
        for name in ("exact", "rung", "promoted_key_blocks", "promoted_value_blocks", "skipped_value_blocks"):
            assert torch.equal(getattr(ours, name), getattr(theirs, name)), (number, name)
        for name in ("key_bound", "value_bound", "dropped_bound", "rounding_bound", "output_norm"):
            mine, wanted = getattr(ours, name), getattr(theirs, name)
            torch.testing.assert_close(mine, wanted, rtol=1e-6, atol=1e-9, msg=f"{number} {name}")
        for name, wanted in theirs.reported.items():
            torch.testing.assert_close(ours.reported[name], wanted, rtol=1e-9, atol=1e-12)
        away = (compiled.exact(query) - steps[1].output.double()).norm(dim=-1)
        assert bool((away <= ours.total_bound).all()), number
        torch.testing.assert_close(compiled.history.attention, plain.history.attention)
    assert (compiled.evicted, compiled.readmitted) == (plain.evicted, plain.readmitted)
    assert compiled.evicted > 0
    compiled.check_intact()


def test_a_damaged_block_at_hand_leads_to_dense_attention_on_the_originals():
    _, layer = layers(explore=1.0)
    query = rows(HEADS * GROUP, DIM, seed=9).float()
    layer.append(rows(HEADS, DIM).float(), rows(HEADS, DIM).float())
    layer.attend(query)
    layer.cache.blocks["value_codes"].data[0, 3, 2, 1] ^= 1
    layer.append(rows(HEADS, DIM).float(), rows(HEADS, DIM).float())
    step = layer.attend(query)
    assert step.certificate.rung.tolist() == [4] * (HEADS * GROUP)
    away = (layer.exact(query) - step.output.double()).norm(dim=-1)
    assert bool((away <= step.certificate.total_bound).all())
    layer.cache.originals[1].data += 1
    layer.append(rows(HEADS, DIM).float(), rows(HEADS, DIM).float())
    with pytest.raises(BrokenRun, match="corrupted"):
        layer.attend(query)


@pytest.mark.parametrize(
    ("fmt", "bits"),
    [
        (TierFormat(6, 16, "float16", "two-level"), 8),
        (TierFormat(16, 8, "float16", "two-level"), 8),
        (TierFormat(16, 16, "float16", "two-level"), 4),
    ],
)
def test_layouts_the_pieces_do_not_read_take_the_plain_step(fmt, bits):
    geometry = Geometry(HEADS * GROUP, HEADS, DIM, "float32", "cpu", SCALE)
    store, step = open_store(geometry, fmt, Cpu(), bits)
    assert (type(store), step) == (GhostStore, GhostStep)
