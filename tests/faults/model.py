"""What a model does to a run: values that are not finite, no memory, stores that break while it answers."""

import random
from unittest import mock

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from rcq_cli import run
from rcq_cli.engine.decoder import Engine
from rcq_cli.engine.hook import Hook
from rcq_cli.store import RunReader
from tests.faults.machine import result
from tests.unit import stub_bench
from tests.unit.stub_bench import Task, Tokenizer, batch, execute, loaded

CONFIG = LlamaConfig(
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "down_proj", "lm_head", "input_layernorm")
BATCH = batch("dense", "certified", ctx=100, samples=3, controls=False, backend="reference", mode_options={})
BAD = (float("nan"), float("inf"), float("-inf"))


class Scored(Task):
    """Gives every answer the same score, so that answers are compared as they are."""

    def score(self, sample, completion):  # noqa: ARG002
        return {"accuracy": 1.0, "length": float(len(completion.output_ids))}


class Words(Tokenizer):
    eos_ids = ()


def bench():
    torch.manual_seed(1)
    made = LlamaForCausalLM(CONFIG).eval().requires_grad_(False)
    made.set_attn_implementation("sdpa")
    return made


def answered(out, model, *, resume=False):
    """Run both modes; return the folders by mode."""
    entries = stub_bench.Stubs("", "", "task", {"stub": Scored()})
    with mock.patch.object(run, "TASKS", entries):
        held = loaded(model=model, tokenizer=Words(), max_positions=256, constructed=False)
        return execute(out, Engine(held, backend="reference"), BATCH, resume=resume, model=held)


_clean = {}


def clean(folder):
    if "rows" not in _clean:
        answered(folder / "clean", bench())
        _clean["rows"] = result(folder / "clean")
    return _clean["rows"]


def compared(folder, out):
    """Return `error` when some sample says what is wrong, `exact` when all are as without a fault."""
    told, fine = False, True
    for mode, (_, rows, *_) in clean(folder).items():
        (place,) = (f for f in out if RunReader(f).spec.mode == mode)
        reader = RunReader(place)
        for row, want in zip(reader.examples(), rows, strict=True):
            failed = row["status"] != "ok"
            fine &= bool(row["error"]) if failed else row["output_ids"] == want["output_ids"]
            fine &= failed or row["first_logits_sha256"] == want["first_logits_sha256"]
            told |= failed
        fine &= not told or reader.summary is not None
        codes = {problem["code"] for problem in reader.summary["problems"]}
        fine &= (6 in codes) == any(row["status"] != "ok" for row in reader.examples())
    return "wrong" if not fine else "error" if told else "exact"


def not_finite(seed, folder):
    """One value of one module becomes NaN or infinite in one of its calls."""
    clean(folder)
    rng, model = random.Random(seed), bench()
    engine_calls = 3 * 2 + 3 * 2 * 3  # check of the model aside: prefills and steps of all samples
    fatal, seen = 8 + rng.randrange(engine_calls), 0
    name = rng.choice([n for n, _ in model.named_modules() if n.endswith(TARGETS)])

    def spoil(_module, _inputs, output):
        nonlocal seen
        seen += 1
        if seen == fatal:
            output = output.clone()
            output.view(-1)[rng.randrange(output.numel())] = BAD[seed % 3]
        return output

    model.get_submodule(name).register_forward_hook(spoil)
    return compared(folder, answered(folder / "run", model))


def out_of_memory(seed, folder):
    """A prefill or a step finds no memory; later there is some again."""
    clean(folder)
    rng, model = random.Random(seed), bench()
    error = (
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory"),
    )[seed % 3]
    fatal, seen = 8 + rng.randrange(18), 0

    def starve(_module, _inputs):
        nonlocal seen
        seen += 1
        if seen == fatal:
            raise error

    handle = model.model.layers[1].register_forward_pre_hook(starve)
    out = answered(folder / "run", model)
    handle.remove()
    rows = [row for place in out for row in RunReader(place).examples()]
    told = compared(folder, out)
    if told == "error" and {row["status"] for row in rows} != {"ok", "oom"}:
        return "wrong"
    answered(folder / "run", model, resume=True)
    return told if result(folder / "run") == clean(folder) else "wrong"


def store_breaks(seed, folder):
    """A bit of a layer's store flips between two steps of a sample."""
    clean(folder)
    rng, real = random.Random(seed), Hook._decode
    fatal, seen = rng.randrange(12), 0

    def decode(self, module, query, key, value, layer, rest):
        nonlocal seen
        store = getattr(layer.state, "cache", None)
        if hasattr(store, "annotations") and store.block_count:
            seen += 1
            if seen == fatal + 1:
                tier = [slab.rows for slab in store.blocks.values()]
                sealed = store.block_count * store.fmt.block
                tier += [slab.rows[:, :sealed] for slab in store.originals]
                rows = rng.choice(tier)
                row = rows[rng.randrange(rows.shape[0]), rng.randrange(rows.shape[1])]
                row.view(-1).view(torch.uint8)[rng.randrange(row.nbytes)] ^= 1 << rng.randrange(8)
        return real(self, module, query, key, value, layer, rest)

    with mock.patch.object(Hook, "_decode", decode):
        out = answered(folder / "run", bench())
    return compared(folder, out) if seen > fatal else "wrong"


CASES = {
    "NaN or infinity from the model": not_finite,
    "out of memory in a sample": out_of_memory,
    "store breaks while a sample is answered": store_breaks,
}
