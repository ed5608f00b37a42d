"""snapkv and tova against loops over plain transformers: nothing of rcq attends, selects or decodes there."""

import pytest
import torch
import transformers
from transformers import DynamicCache

from rcq_cli.cache.statistics import needs_of
from rcq_cli.engine.decoder import Engine
from rcq_cli.modes import snapkv, tova
from rcq_cli.protocols import Loaded, Sample

HEADS, KV_HEADS, LAYERS, PROMPT, NEW = 6, 2, 3, 90, 12


class Words:
    """The least a tokenizer can be."""

    eos_ids = ()

    def decode(self, ids):
        return " ".join(map(str, ids))


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(5)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=96, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=256,
        initializer_range=0.3, eos_token_id=None, bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompt(seed):
    return torch.randint(3, 97, (1, PROMPT), generator=torch.Generator().manual_seed(seed))


def eager(model, *args, **kwargs):
    """Run the stock model with its own eager attention, which returns what it attended to."""
    model.set_attn_implementation("eager")
    try:
        return model(*args, **kwargs, use_cache=True, output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")


def kept_part(cache, kept, model):
    """A stock cache with the slots `kept[layer]` `[Hkv, n]` of another."""
    twin = DynamicCache(config=model.config)
    for layer, slots in enumerate(kept):
        keys, values = cache.layers[layer].keys[0], cache.layers[layer].values[0]
        pair = [torch.stack([rows[h][slots[h]] for h in range(KV_HEADS)])[None] for rows in (keys, values)]
        twin.update(*pair, layer)
    return twin


def snap_rule(attention, budget, window, kernel):
    """Slots per KV head: the window, and what its rows attend to most after max-pooling."""
    rows = attention[0, :, -window:].double()
    votes = rows.unflatten(0, (KV_HEADS, -1)).mean(1).sum(1)[:, : PROMPT - window].tolist()
    kept = []
    for vote in votes:
        half = kernel // 2
        pooled = [max(vote[max(0, j - half) : j + half + 1]) for j in range(len(vote))]
        best = sorted(range(len(vote)), key=lambda j: (-pooled[j], j))[: budget - window]
        kept.append(torch.tensor(sorted(best) + list(range(PROMPT - window, PROMPT))))
    return torch.stack(kept)


def tova_rule(row, budget):
    """Slots per KV head: the newest, and the `budget - 1` others that `row` `[Hq, n]` attends to most."""
    means = row.double().unflatten(0, (KV_HEADS, -1)).mean(1).tolist()
    kept = []
    for mean in means:
        newest = len(mean) - 1
        best = sorted(range(newest), key=lambda j: (-mean[j], j))[: budget - 1]
        kept.append(torch.tensor([*sorted(best), newest]))
    return torch.stack(kept)


@torch.inference_mode()
def plain(model, ids, choose, each_step):
    """Tokens, and the true positions kept after the prompt, of a greedy decode on a cache cut by hand."""
    cache = DynamicCache(config=model.config)
    out = eager(model, ids, cache=cache)
    positions = [choose(attention) for attention in out.attentions]
    first = [p.clone() for p in positions]
    cache = kept_part(cache, positions, model)
    tokens, logits = [], out.logits[0, -1]
    for t in range(NEW):
        tokens.append(int(logits.argmax()))
        if t == NEW - 1:
            break
        # the key is rotated to its true position, whatever the cache holds
        out = eager(
            model, torch.tensor([[tokens[-1]]]), cache=cache, position_ids=torch.tensor([[PROMPT + t]])
        )
        logits = out.logits[0, -1]
        if each_step:
            slots = [each_step(attention[0, :, -1]) for attention in out.attentions]
            cache = kept_part(cache, slots, model)
    return tokens, first


def by_rcq(model, ids, mode, options):
    engine = Engine(Loaded("tiny", model, Words(), {}, 256, 4096), backend="reference")
    sample = Sample("a", 0, "c", tuple(ids[0].tolist()), PROMPT, (), NEW, (), 0)
    prefill = engine.prefill(sample.prompt_ids, [(mode, options)])
    states, _ = engine._states(prefill, sample, mode, options)
    tokens = engine.decode(prefill, sample, mode, options).completion.output_ids
    return list(tokens), [state.positions.rows for state in states]


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [20, 60])
def test_snapkv_keeps_and_says_what_its_rule_says_in_plain_transformers(model, seed, budget):
    ids = prompt(seed)
    options = snapkv.Options(keep_tokens=budget, window=8, kernel=5)
    assert needs_of(snapkv.MODE, options).last_rows == 8
    theirs, kept = plain(model, ids, lambda attention: snap_rule(attention, budget, 8, 5), None)
    ours, positions = by_rcq(model, ids, snapkv.MODE, options)
    for layer in range(LAYERS):
        assert torch.equal(positions[layer].long(), kept[layer])
    assert ours == theirs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("budget", [20, 80])
def test_tova_keeps_and_says_what_its_rule_says_in_plain_transformers(model, seed, budget):
    ids = prompt(seed)
    theirs, kept = plain(
        model, ids, lambda a: tova_rule(a[0, :, -1], budget), lambda row: tova_rule(row, budget)
    )
    ours, positions = by_rcq(model, ids, tova.MODE, tova.Options(keep_tokens=budget))
    for layer in range(LAYERS):
        assert torch.equal(positions[layer].long(), kept[layer])
    assert ours == theirs


def test_what_is_evicted_matters_to_these_models(model):
    """Otherwise equal answers above would say nothing."""
    ids = prompt(0)
    everything, _ = plain(model, ids, lambda _: torch.arange(PROMPT).expand(KV_HEADS, -1), None)
    answers = {tuple(plain(model, ids, lambda a, b=b: snap_rule(a, b, 8, 5), None)[0]) for b in (20, 60)}
    assert tuple(everything) not in answers
    assert len(answers) == 2


def test_a_sharp_model_in_bfloat16_is_not_refused_for_its_own_rounding():
    """One call over all tokens differs from steps by more than the probe allows; the hook does not."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=12, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    sharp = transformers.AutoModelForCausalLM.from_config(config).eval()
    with torch.inference_mode():
        for layer in sharp.model.layers:
            layer.self_attn.q_proj.weight.mul_(20)
        sharp.to(torch.bfloat16)
        ids, cache = torch.arange(3, 12)[None], DynamicCache(config=config)
        once = sharp(ids, use_cache=False).logits[:, -1].float()
        sharp(ids[:, :7], cache=cache, use_cache=True)
        for t in (7, 8):
            stepwise = sharp(ids[:, t : t + 1], cache=cache, use_cache=True).logits[:, -1].float()
    Engine(Loaded("sharp", sharp, Words(), {}, 256, 4096), backend="reference")
    if torch.equal(stepwise, once):
        pytest.skip("this processor rounds one call and steps alike")
    assert (stepwise - once).abs().max() > 0.05 * once.abs().max()
