"""The instrument model: what its formulas promise is checked in closed form, then dense has to be right."""

import itertools
import random
import socket
from functools import lru_cache
from types import MethodType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from rcq_cli.errors import SpecError
from rcq_cli.models import _needle_weights as formulas
from rcq_cli.models import needle, needle_hard
from rcq_cli.models._needle_words import build_tokenizer, token_lists
from rcq_cli.models._tokenizer import ModelTokenizer
from rcq_cli.tasks._words import adjectives, nouns, vocabulary

SOURCES = {"needle": needle.SOURCE, "needle-hard": needle_hard.SOURCE}
FORMS = {
    "The locker of {K} opens with {V}.": "What opens the locker of {K}?",
    "Letters from {K} bear seal {V}.": "Which seal do letters from {K} bear?",
    "Payments for {K} go to {V}.": "Where do payments for {K} go?",
}
SENTENCES = (
    "The ferry waited.",
    'Nobody asked, "Where is the keeper?"',
    "Had the baker really gone home?\n\n",
    "A cold wind came over the harbour and the lamps went out one after another.",
)


@lru_cache(maxsize=3)
def load(reference, dtype="float32"):
    return SOURCES[reference.partition(":")[0]].load(reference, device="cpu", dtype=dtype)


@pytest.fixture(scope="module")
def plain():
    return load("needle")


@pytest.fixture(scope="module")
def hard():
    return load("needle-hard")


@pytest.fixture(scope="module")
def tokenizer():
    return ModelTokenizer(build_tokenizer())


def question(rng, sentence, ask, tokens, decoys=16):
    keys = [
        f"{a}-{n}"
        for a, n in zip(rng.sample(adjectives(), decoys + 1), rng.sample(nouns(), decoys + 1), strict=True)
    ]
    values = [str(rng.randrange(1_000_000, 10_000_000)) for _ in keys]
    prose = [rng.choice(SENTENCES) for _ in range(max(1, (tokens - 17 * decoys) // 10))]
    for key, value in zip(keys, values, strict=True):
        prose.insert(rng.randrange(len(prose) + 1), sentence.format(K=key, V=value))
    user = f"Read the chronicle below. {' '.join(prose)} {ask.format(K=keys[0])} Reply with the value only."
    return user, sentence.format(K=keys[0], V="").removesuffix(" ."), values[0]


@torch.inference_mode()
def answer(loaded, ids, steps=5):
    cache, out = DynamicCache(config=loaded.model.config), []
    for start in range(0, len(ids), loaded.prefill_chunk):
        chunk = torch.tensor([ids[start : start + loaded.prefill_chunk]])
        logits = loaded.model(chunk, cache=cache, logits_to_keep=1).logits
    for _ in range(steps):
        out.append(int(logits[0, -1].argmax()))
        logits = loaded.model(torch.tensor([out[-1:]]), cache=cache, logits_to_keep=1).logits
    return loaded.tokenizer.decode(out)


def right_answers(loaded, rng, tokens, rounds=1):
    """Count right answers over every form; return that and the number asked."""
    hits = 0
    for sentence, ask in list(FORMS.items()) * rounds:
        user, prefix, value = question(rng, sentence, ask, tokens)
        hits += answer(loaded, loaded.tokenizer.prompt(user, prefix).ids).lstrip().startswith(value)
    return hits, len(FORMS) * rounds


def random_ids(loaded, count, seed=0):
    return torch.randint(
        300, loaded.model.config.vocab_size - 64, (1, count), generator=torch.manual_seed(seed)
    )


@torch.inference_mode()
def streams(loaded, ids):
    """Return the residual stream before layer 0, before layer 1 and (unnormalised) after it."""
    after = []
    handle = loaded.model.model.layers[1].register_forward_hook(lambda _m, _a, out: after.append(out))
    hidden = loaded.model.model(ids, output_hidden_states=True).hidden_states
    handle.remove()
    return hidden[0][0], hidden[1][0], after[0][0]


@torch.inference_mode()
def matching_projections(loaded, ids):
    layer = loaded.model.model.layers[1]
    x = layer.input_layernorm(streams(loaded, ids)[1])
    return layer.self_attn.q_proj(x).unflatten(-1, (-1, 128)), layer.self_attn.k_proj(x)


# -- tokenizer ----------------------------------------------------------------------------------------------


def test_a_number_is_a_space_and_groups_of_three_from_the_left(tokenizer):
    assert [tokenizer.decode([i]) for i in tokenizer.encode("x 7700770")] == ["x", " ", "770", "077", "0"]


def test_every_listed_word_is_one_token_in_four_spellings(tokenizer):
    for word in vocabulary():
        for form in (word, word.capitalize()):
            assert len(tokenizer.encode(form)) == len(tokenizer.encode(f" {form}")) == 1, form


@settings(deadline=None, max_examples=300)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_any_text_comes_back(text):
    wrapped = ROUND_TRIP
    assert wrapped.decode(wrapped.encode(text)) == text


ROUND_TRIP = ModelTokenizer(build_tokenizer(["harbour", "the"]))


def test_text_that_spells_a_special_token_stays_text(tokenizer):
    prompt = tokenizer.prompt("before <bos> <eos> after", "x")
    assert prompt.ids.count(tokenizer.bos_id) == 1
    assert prompt.ids[0] == tokenizer.bos_id
    assert not set(prompt.ids) & set(tokenizer.eos_ids)


def test_no_bos_unless_wanted(tokenizer):
    assert tokenizer.bos_id not in tokenizer.prompt("a", "b", bos="never").ids


# -- closed form --------------------------------------------------------------------------------------------


def test_copied_codes_are_exact(plain):
    ids = random_ids(plain, 60)
    before, after, _ = streams(plain, ids)
    slots = after[:, formulas.SLOTS].unflatten(-1, (8, 16))
    for back in range(1, 9):
        assert (slots[8:, back - 1] - before[8 - back : -back, formulas.MATCH]).abs().max() < 1e-6


def test_squared_norms_are_three_eleven_and_twelve(plain):
    repeated = random_ids(plain, 40).tile(1, 2)
    squared = [(part**2).sum(-1) for part in streams(plain, repeated)]
    assert squared[0] == pytest.approx(torch.full((80,), 3.0), abs=1e-5)
    assert squared[1][8:] == pytest.approx(torch.full((72,), 11.0), abs=1e-4)
    assert squared[2][-20:] == pytest.approx(torch.full((20,), 12.0), abs=0.02)


def test_the_nearest_wrong_offset_loses_34_nats(plain):
    attention = plain.model.model.layers[0].self_attn
    x = plain.model.model.layers[0].input_layernorm(streams(plain, random_ids(plain, 40))[0])
    with torch.inference_mode():
        query, key = attention.q_proj(x).unflatten(-1, (8, 128)), attention.k_proj(x)
    angle = torch.arange(40)[:, None] * 10 ** (-torch.arange(64) / 64)
    turn = torch.polar(torch.ones_like(angle), angle)

    def rotated(rows):
        return torch.complex(rows[..., :64], rows[..., 64:]) * turn.view(40, *[1] * (rows.ndim - 2), 64)

    scores = torch.einsum("hi,ti->ht", rotated(query)[-1].conj(), rotated(key)).real / 128**0.5
    best = scores.flip(1).sort(descending=True)
    assert best.indices[:, 0].tolist() == list(range(1, 9))
    assert best.values[:, 0] == pytest.approx(torch.full((8,), 320.0), rel=1e-4)
    assert best.values[:, 0] - best.values[:, 1] == pytest.approx(torch.full((8,), 0.107 * 320), rel=0.01)


@pytest.mark.parametrize("preset", ["plain", "hard"])
def test_scores_are_cosines_of_contexts_up_to_a_common_constant(preset, request):
    loaded = request.getfixturevalue(preset)
    beta = {"plain": 8 / 0.025, "hard": 8 / 0.0015}[preset]
    ids = random_ids(loaded, 50)
    query, key = matching_projections(loaded, ids)
    codes = loaded.model.model.embed_tokens.weight[ids[0], formulas.MATCH].double().detach()
    last = len(codes) - 1
    places = range(10, last)
    expected = [beta / 8 * sum(codes[last - j] @ codes[s - 1 - j] for j in range(8)) for s in places]
    measured = (query[last, 0].double() @ key[places.start : places.stop].double().T) / 128**0.5
    difference = measured - torch.stack(expected)
    assert (difference - difference.mean()).abs().max() < 2e-6 * beta + 2e-3


def test_all_query_heads_ask_the_same(plain):
    query, _ = matching_projections(plain, random_ids(plain, 12))
    assert torch.equal(query, query[:, :1].expand_as(query))


def test_outliers_do_not_change_the_attention():
    ids = random_ids(load("needle:outliers=0"), 60)
    weights = []
    for count in (0, 4):
        query, key = matching_projections(load(f"needle:outliers={count},key_margin=0.2"), ids)
        weights.append(torch.softmax(query[-1].double() @ key[8:].double().T / 128**0.5, -1))
    assert (weights[0] - weights[1]).abs().max() < 1e-4


def test_outlier_channels_hold_a_constant_of_64_ordinary_ones(plain):
    _, key = matching_projections(plain, random_ids(plain, 200))
    ordinary = key[8:, 4:].pow(2).mean().sqrt()
    assert key[8:, :4].mean(0) / ordinary == pytest.approx(torch.tensor([64.0, -64, 64, -64]), rel=0.05)
    assert key[8:, :4].std(0) / ordinary == pytest.approx(torch.full((4,), 4.0), rel=0.3)


@pytest.mark.parametrize(("preset", "key_margin"), [("plain", 0.025), ("hard", 0.0015)])
def test_another_key_falls_short_by_eight_nats_in_the_mean(preset, key_margin, request, tokenizer):
    model = request.getfixturevalue(preset).model
    gaps = []
    for words in (adjectives(), nouns()):
        ids = [tokenizer.encode(f" {word}")[0] for word in words]
        codes = model.model.embed_tokens.weight[ids, formulas.MATCH].double().detach()
        cosines = codes @ codes.T
        gaps.append(8 / key_margin / 8 * (1 - cosines[~torch.eye(len(ids), dtype=torch.bool)]))
    # one wrong word of the two: half of the eight nats in the mean, and never below 0.3 of that
    for gap in gaps:
        assert gap.mean().item() == pytest.approx(4.0, rel=0.1)
        assert gap.min().item() > 1.2 - 0.02


@pytest.mark.parametrize(("preset", "margin"), [("plain", 0.07), ("hard", 0.04)])
def test_answer_tokens_of_one_class_lie_the_value_margin_apart(preset, margin, request, tokenizer):
    model = request.getfixturevalue(preset).model
    ids = [tokenizer.encode(f"{number:03}")[0] for number in range(0, 1000, 7)]
    values = model.model.embed_tokens.weight[ids, formulas.VALUE].double().detach()
    assert values.norm(dim=1) == pytest.approx(torch.ones(len(ids), dtype=torch.float64), abs=1e-6)
    assert torch.pdist(values).mean().item() == pytest.approx(margin, rel=0.02)


def test_logits_of_twins_differ_linearly_in_the_value_margin(hard, tokenizer):
    first, second = (tokenizer.encode(text)[0] for text in ("123", "456"))
    model = hard.model
    after = torch.zeros(1, formulas.HIDDEN)
    after[0, formulas.OUTPUT] = model.model.embed_tokens.weight[first, formulas.VALUE]
    # eleven of the twelve units of squared norm stand in the other slots
    after[0, 0] = 11**0.5
    logits = model.lm_head(model.model.norm(after))[0]
    head = model.lm_head.weight[[first, second], formulas.OUTPUT].double().detach()
    scale = 40 / head[0].norm() * 2**0.5
    distance = ((head[0] - head[1]) * scale / 40).norm() ** 2 / 2
    assert (logits[first] - logits[second]).item() == pytest.approx(
        40 * 0.04 / 2**0.5 * distance.item(), rel=1e-3
    )
    assert logits.argmax() == first


def test_key_words_share_one_code_in_every_spelling():
    tokenizer = build_tokenizer()
    lists = token_lists(tokenizer)
    ids = [tokenizer.convert_tokens_to_ids(form) for form in ("amber", "Amber", "Ġamber", "ĠAmber")]
    assert len({lists.stems[number] for number in ids}) == 1
    assert len(set(ids)) == 4


def test_blanks_and_signs_share_one_code_and_letters_do_not():
    tokenizer = build_tokenizer()
    stems = token_lists(tokenizer).stems

    def codes(text):
        return {stems[tokenizer.encode(sign, add_special_tokens=False)[0]] for sign in text}

    assert len(codes(' \n\t.?!",-')) == 1
    assert len(codes("abcABC")) == 3


def test_drawn_families_are_orthogonal_to_their_centre_and_apart():
    centre, free = formulas._family(np.random.RandomState(0), 400, 16)
    assert np.abs(free @ centre).max() < 1e-12
    assert (free @ free.T)[~np.eye(400, dtype=bool)].max() <= 0.7


# -- behaviour ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("preset", "seed"), list(itertools.product(SOURCES, (0, 7))))
def test_dense_is_right_among_sixteen_decoys(preset, seed):
    hits, asked = right_answers(load(f"{preset}:seed={seed}"), random.Random(seed), tokens=700)
    assert hits == asked


@pytest.mark.slow
@pytest.mark.parametrize("preset", SOURCES)
def test_dense_is_right_at_4k(preset):
    hits, asked = right_answers(load(preset), random.Random(3), tokens=4000, rounds=2)
    assert hits == asked


@pytest.mark.parametrize("reference", ["needle:heads=2", "needle:layers=3"])
def test_more_heads_and_layers_answer_alike(reference):
    hits, asked = right_answers(load(reference), random.Random(2), tokens=600)
    assert hits == asked


@pytest.mark.parametrize(("reference", "dtype"), [("needle", "bfloat16"), ("needle-hard", "float16")])
def test_dense_is_right_in_16_bits(reference, dtype):
    hits, asked = right_answers(load(reference, dtype), random.Random(4), tokens=500)
    assert hits == asked


def test_a_wrong_needle_at_a_line_start_does_not_win(hard):
    user = (
        "The lamps went out. Letters from amber-zodiac bear seal 1234567. The ferry waited.\n\n"
        "Letters from azure-alligator bear seal 7654321. Which seal do letters from amber-zodiac bear?"
    )
    prompt = hard.tokenizer.prompt(user, "Letters from amber-zodiac bear seal")
    assert answer(hard, prompt.ids).strip().startswith("1234567")


def test_other_attention_implementations_agree(plain):
    ids = random_ids(plain, 40)
    with torch.inference_mode():
        expected = plain.model(ids).logits
        plain.model.set_attn_implementation("eager")
        found = plain.model(ids).logits
    plain.model.set_attn_implementation("sdpa")
    assert (found - expected).abs().max() < 1e-3


def test_a_seed_fixes_the_weights_and_no_global_generator_moves():
    state = torch.get_rng_state()
    first, again, other = (load.__wrapped__(f"needle:seed={seed}") for seed in (5, 5, 6))
    assert torch.equal(torch.get_rng_state(), state)
    for (name, weight), same, different in zip(
        first.model.state_dict().items(),
        again.model.state_dict().values(),
        other.model.state_dict().values(),
        strict=True,
    ):
        assert torch.equal(weight, same), name
        assert "embed" not in name or not torch.equal(weight, different)
    assert first.fingerprint == again.fingerprint
    assert first.fingerprint["model.weights_sha256"] != other.fingerprint["model.weights_sha256"]


def test_building_needs_no_network(monkeypatch):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a socket was opened")

    monkeypatch.setattr(socket, "socket", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    loaded = load.__wrapped__("needle")
    assert loaded.max_positions == 262_144
    assert loaded.prefill_chunk == 256
    assert loaded.constructed
    assert isinstance(loaded.model.generate, MethodType)


def test_names_show_what_was_changed(plain):
    assert plain.name == "needle (constructed)"
    assert load("needle:seed=3,key_margin=0.05").name == "needle:key_margin=0.05,seed=3 (constructed)"
    assert plain.fingerprint["model.id"] == (
        "needle:key_margin=0.025,value_margin=0.07,outliers=4,seed=0,heads=1,layers=1"
    )


def test_a_margin_can_be_unset():
    knobs = needle.SOURCE.knobs("needle:key_margin=off,value_margin=off")
    assert (knobs.key_margin, knobs.value_margin, knobs.beta) == (None, None, 80.0)


@pytest.mark.parametrize(
    ("reference", "part"),
    [
        ("needle:key_margin=0.3", "0.25"),
        ("needle:outliers=1.5", "whole number"),
        ("needle:outliers=-1", "0 to 128"),
        ("needle:seed=off", "whole number"),
        ("needle:value_margin=nan", "off"),
        ("needle:key_magin=0.1", "did you mean 'key_margin'"),
        ("needle:seed=1,seed=2", "twice"),
        ("needle:seed", "seed"),
    ],
)
def test_a_wrong_knob_is_a_usage_error(reference, part):
    with pytest.raises(SpecError, match=part):
        needle.SOURCE.load(reference, device="cpu", dtype="auto")


def test_bfloat16_is_refused_below_its_margins():
    with pytest.raises(SpecError, match="bfloat16"):
        load("needle-hard", "bfloat16")
