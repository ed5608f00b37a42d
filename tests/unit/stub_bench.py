"""A task, two modes and an engine without a model, to drive every row, problem and exit of a run.

As a program, `python -m tests.unit.stub_bench OUT ROWS` runs both modes and dies hard after that many rows.
"""

import os
import sys
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from rcq_cli import run
from rcq_cli.errors import BrokenRun
from rcq_cli.executors.local import LocalExecutor
from rcq_cli.progress import Silent
from rcq_cli.protocols import Completion, Decoded, LayerBytes, Loaded, Sample, StepArrays
from rcq_cli.registry import Registry
from rcq_cli.spec import RunSpec

GEN = 4


@dataclass(frozen=True)
class TaskOptions:
    decoys: int | None = None


@dataclass(frozen=True)
class ModeOptions:
    eps: float = 0.05


@dataclass
class Tokenizer:
    bos_id: int = 1
    eos_ids: tuple = (2,)
    has_chat_template: bool = False
    sha256: str = "tok"

    def decode(self, ids):
        return " ".join(map(str, ids))


def sample(part, index, ctx, seed, control=None, floor=None):
    """A prompt of ctx - GEN ids (the first is the BOS) whose answer is its sample id."""
    name = "/".join(filter(None, ("stub", part, str(ctx), control, str(index))))
    draw = np.random.default_rng([seed, index, len(part), len(control or "")])
    ids = (1, *(int(x) for x in draw.integers(3, 1000, ctx - GEN - 1)))
    return Sample(
        sample_id=name,
        index=index,
        cluster=f"form{index % 3}",
        prompt_ids=ids,
        context_len=len(ids),
        references=(f"<{name}>",),
        max_new_tokens=GEN,
        stop_ids=(),
        seed=index,
        meta={"corpus_kind": "procedural"} | ({} if floor is None else {"fill_floor": floor}),
        control=control,
    )


@dataclass
class Task:
    parts: tuple = ("",)
    floor: float | None = None
    leak: bool = False
    drawn: list = field(default_factory=list)
    name: str = "stub"
    Options: type = TaskOptions
    generator: str = "g-1"
    prompt_set: str = "p-1"
    metric: str = "exact@1"
    score_key: str = "accuracy"
    higher_is_better: bool = True
    minimum_ctx: int = 8

    def samples(self, request, _tokenizer):
        for index in range(request.samples):
            self.drawn.append((request.part, index))
            yield sample(request.part, index, request.ctx, request.seed, floor=self.floor)

    def controls(self, request, _tokenizer):
        for control in ("needle-only", "no-needle"):
            yield sample(request.part, 0, request.ctx, request.seed, control)

    def score(self, sample, completion):
        hit = float(sample.references[0] in completion.text)
        if sample.control == "no-needle" and not self.leak:
            hit = 0.0
        return {"accuracy": hit, "length": float(len(completion.text))}


@dataclass
class Engine:
    """Answers with the reference unless `behave(mode, sample)` says otherwise."""

    behave: object = lambda _mode, _sample: "right"
    kill_after: int | None = None
    prefills: list = field(default_factory=list)
    decoded: list = field(default_factory=list)
    audits: list = field(default_factory=list)
    backend_name: str = "stub"
    notes: tuple = ()

    def describe(self):
        return {"pipeline.prefill_mode": "dense"}

    def check_modes(self, modes):
        pass

    def prefill(self, ids, _modes=()):
        self.prefills.append(ids)
        return SimpleNamespace(ns=1000, tokens=len(ids))

    def decode(self, _prefill, sample, mode, _options, *, audit):
        if self.kill_after is not None and len(self.decoded) == self.kill_after:
            os._exit(9)
        self.decoded.append((mode.name, sample.sample_id))
        self.audits.append((sample.control, audit))
        what = self.behave(mode.name, sample)
        if isinstance(what, BaseException):
            raise what
        return decoded(mode, sample, what)


def decoded(mode, sample, what):
    text = sample.references[0] if what in ("right", "inactive", "violated") else "no idea"
    reason = {"inactive": "inactive", "short": "short_context"}.get(what, "")
    certified = mode.certifies
    return Decoded(
        completion=Completion((5, 6, 2), text, "eos"),
        step_ns=(1_000_000, 3_000_000),
        prefill_ns=1000,
        steps=arrays(sample, violated=what == "violated") if certified else None,
        bytes=LayerBytes(100 + sample.index, 7, 3, 5, 200 + sample.index),
        engagement={"engaged": not reason, "reason": reason},
        first_logits_sha256=sha256(sample.sample_id.encode()).hexdigest(),
    )


def arrays(sample, violated):
    rng = np.random.default_rng(sample.index)
    shape = (2, 1, 2)
    bound = rng.random(shape).astype(np.float32) / 10
    zeros = np.zeros(shape, np.float32)
    flags = np.zeros(shape, bool)
    counts = np.ones(shape, np.int32)
    return StepArrays(
        key_bound=bound,
        value_bound=zeros,
        dropped_bound=zeros,
        rounding_bound=zeros,
        total_bound=bound,
        output_norm=zeros + 1,
        true_error=zeros,
        violated=flags | violated,
        exact=flags,
        rung=counts.astype(np.int8),
        promoted_key_blocks=counts,
        promoted_value_blocks=counts,
        blocks=np.full((2, 1), 4, np.int32),
        paged_bytes=np.full((2, 1), 10),
        layers=(0,),
    )


def loaded(**changes):
    values = {
        "name": "stub (constructed)",
        "model": None,
        "tokenizer": Tokenizer(),
        "fingerprint": {"model.id": "stub", "model.dtype": "float16"},
        "max_positions": 1024,
        "prefill_chunk": 64,
        "constructed": True,
    }
    return Loaded(**values | changes)


@dataclass(frozen=True)
class Stubs(Registry):
    entries: dict = field(default_factory=dict)

    def names(self):
        return tuple(sorted(self.entries))

    def load(self, name):
        return self.entries[self.resolve(name)]


MODES = {
    "dense": SimpleNamespace(name="dense", label="reference", certifies=False, Options=ModeOptions),
    "certified": SimpleNamespace(name="certified", label="certified", certifies=True, Options=ModeOptions),
}


def install(task):
    """Put the stubs in the place of the registries; returns what was there."""
    was = run.TASKS, run.MODES
    run.TASKS, run.MODES = Stubs("", "", "task", {"stub": task}), Stubs("", "", "mode", MODES)
    return was


def batch(*modes, **changes):
    values = {
        "model": "stub",
        "task": "stub",
        "ctx": 32,
        "samples": 5,
        "task_options": {"decoys": None},
        "mode_options": {"eps": 0.05},
    }
    return tuple(RunSpec(mode=mode, **values | changes) for mode in modes or ("dense", "certified"))


def execute(out, engine, *batches, resume=False, model=None, progress=None):
    """Run batches with the local executor; returns the folders."""
    bench = run.Bench(model or loaded(), engine)
    executor = LocalExecutor(engine_for=lambda _spec: bench)
    return executor.run(batches or (batch(),), out=out, resume=resume, progress=progress or Silent())


OUT_OF_MEMORY = MemoryError("no room")
NAN = BrokenRun("NaN or infinite logits", id="RCQ-RUN-NAN")

if __name__ == "__main__":
    install(Task(parts=("", "b")))
    execute(Path(sys.argv[1]), Engine(kill_after=int(sys.argv[2])))
