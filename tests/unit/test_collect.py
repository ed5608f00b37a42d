"""What an engine collects of a prefill's attention: exactly what modes ask for, whatever the chunks."""

import pytest
import torch
import transformers

from rcq_cli.api import MODES
from rcq_cli.engine import hook as hooks
from rcq_cli.engine.decoder import Engine, collecting_ns
from rcq_cli.engine.hook import managed_layers
from rcq_cli.protocols import Loaded, Needs, Sample


class Silent:
    eos_ids = ()

    def decode(self, ids):
        return str(ids)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, initializer_range=0.3, eos_token_id=None,
        bos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def engine(model, chunk=64):
    return Engine(Loaded("tiny", model, Silent(), {}, 512, chunk), backend="reference")


IDS = torch.randint(1, 97, (150,), generator=torch.Generator().manual_seed(1)).tolist()


def asked(*names):
    return [(MODES.load(name), MODES.load(name).Options()) for name in names]


def statistics(prefill):
    return [layer.statistics() for layer in managed_layers(prefill.cache).values()]


def test_nothing_is_collected_for_modes_that_ask_nothing(model):
    for modes in ((), asked("dense", "naive", "kivi", "quest", "certified")):
        prefill = engine(model).prefill(IDS, modes)
        assert statistics(prefill) == [None] * 3
        assert collecting_ns(prefill.cache) == 0


def test_the_union_of_needs_and_no_more(model):
    seen = statistics(engine(model).prefill(IDS, asked("tova", "snapkv", "dense")))
    for layer in seen:
        assert layer.columns is None
        assert layer.positions.tolist() == list(range(150 - 32, 150))
    seen = statistics(engine(model).prefill(IDS, asked("tova", "h2o")))
    for layer in seen:
        assert layer.positions.tolist() == [149]
        torch.testing.assert_close(layer.columns.sum(-1), torch.full((2,), 150.0))


@pytest.mark.parametrize("chunk", [1, 7, 149])
def test_chunks_change_nothing(model, chunk):
    whole = statistics(engine(model, 150).prefill(IDS, asked("h2o", "snapkv")))
    parts = statistics(engine(model, chunk).prefill(IDS, asked("h2o", "snapkv")))
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.columns, other.columns, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(one.queries, other.queries, rtol=1e-4, atol=1e-4)


def test_columns_are_those_of_the_models_own_attention(model):
    """Eager attention returns the probabilities that our collector never stores."""
    seen = statistics(engine(model, 50).prefill(IDS, asked("h2o")))
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            attentions = model(torch.tensor([IDS]), output_attentions=True).attentions
    finally:
        model.set_attn_implementation("sdpa")
    for layer, probabilities in zip(seen, attentions, strict=True):
        expected = probabilities[0].view(2, 2, 150, 150).mean(1).sum(1)
        torch.testing.assert_close(layer.columns, expected, rtol=1e-3, atol=1e-3)


def test_the_last_layer_is_collected_although_it_computes_one_row_only(model):
    """Its queries arrive complete; what the shortcut leaves out is attention nobody reads."""
    short = statistics(engine(model).prefill(IDS, asked("h2o", "snapkv")))[-1]
    cache = hooks.make_cache(model, 150)
    hook = hooks.Hook(3)
    hook.managed = frozenset(managed_layers(cache))
    hook.needs = (Needs(column_sums=True, last_rows=32),)
    with hooks.attached(model, hook), torch.inference_mode():
        for first in range(0, 150, 64):
            model(torch.tensor([IDS[first : first + 64]]), cache=cache, use_cache=True)
    full = managed_layers(cache)[2].statistics()
    assert torch.equal(short.columns, full.columns)
    assert torch.equal(short.queries, full.queries)


def test_a_mode_the_prefill_was_not_told_of_gets_its_statistics(model):
    sample = Sample("s", 0, "c", tuple(IDS), 150, (), 5, (), 0)
    (mode,) = asked("h2o")
    told = engine(model).decode(engine(model).prefill(IDS, [mode]), sample, *mode)
    late = engine(model).decode(engine(model).prefill(IDS), sample, *mode)
    other = engine(model).decode(engine(model).prefill(IDS, asked("tova")), sample, *mode)
    assert told.completion == late.completion == other.completion
    assert told.bytes == late.bytes == other.bytes
    assert told.engagement["engaged"]


def test_selection_is_charged_to_the_mode_and_once(model):
    worker = engine(model)
    modes = asked("h2o", "tova")
    prefill = worker.prefill(IDS, modes)
    collected = collecting_ns(prefill.cache)
    assert collected > 0
    first, again = (Sample("s", i, "c", (*IDS, 5 + i), 150, (), 3, (), 0) for i in (0, 1))
    charged = {mode.name: worker.decode(prefill, first, mode, options) for mode, options in modes}
    assert charged["h2o"].selection_ns > collected
    assert charged["tova"].selection_ns > 0
    # a second question on the same context forks what the first selected
    assert worker.decode(prefill, again, *modes[0]).selection_ns == 0


@pytest.mark.parametrize("asks", [0, 3])
def test_a_selection_that_saw_the_question_says_so(model, asks):
    sample = Sample("s", 0, "c", tuple(IDS), 150 - asks, (), 3, (), 0)
    for name, told in (("tova", True), ("streaming-llm", False), ("dense", False)):
        (mode,) = asked(name)
        record = (
            engine(model).decode(engine(model).prefill(IDS[: 150 - asks], [mode]), sample, *mode).engagement
        )
        assert record.get("query_aware") == ((asks == 0) if told else None)
