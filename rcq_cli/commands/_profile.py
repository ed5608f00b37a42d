"""From a plan or a geometry to the cells of `rcq profile`: what stands between flags and the document."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from rcq_cli import profiling
from rcq_cli.errors import UnsupportedHere
from rcq_cli.profiling import Effort
from rcq_cli.readings import Reading, Status, absent
from rcq_cli.telemetry import bandwidth, host

if TYPE_CHECKING:
    from rcq_cli.engine.ledger import Rest
    from rcq_cli.engine.stepper import Stepper
    from rcq_cli.presets import Plan
    from rcq_cli.shell import Shell
    from rcq_cli.spec import RunSpec

Json = Any


class Asked(NamedTuple):
    """The flags of profile alone."""

    effort: Effort
    attribution: bool = False
    required: tuple[str, ...] = ()
    every: int = 0
    """Layers are told apart in each so many steps; 0: never."""
    cold: bool = False
    """Empty the processor's caches before each step."""


class Place(NamedTuple):
    """What a cell is about."""

    facts: Mapping[str, Json]
    """`ctx`, `mode`, `model` or `geometry`, `backend`, ..."""
    candidate: Stepper
    reference: Stepper | None
    """Dense on the same prompt or tensors; None where the mode is dense itself."""
    device: str
    rest: Rest | None
    """What the model holds besides; None for a layer without a model."""
    peaks: Mapping[str, Reading]


class Room:
    """What is measured once and serves every cell: bandwidth, and how busy the machine was before."""

    def __init__(self, device: str) -> None:
        self.load = host.load_average()
        self.before = host.memory()
        self.bandwidth = bandwidth.measure(device)
        self.quota = host.cpu_quota()

    @property
    def ceiling(self) -> Reading:
        """Return the read bandwidth."""
        return self.bandwidth["read_gb_per_s"]

    def noisy(self) -> str:
        """Return why this machine gives no verdict on time, or nothing."""
        cores = self.quota.value or os.cpu_count() or 1
        if self.load.value is not None and self.load.value > cores / 2:
            return f"noisy: load {self.load.value:.2f} on {cores:g} cores before the run began"
        return ""

    def to_json(self) -> dict[str, Json]:
        """Return the record of the machine's state."""
        return {
            "load_average": self.load.to_json(),
            "cpu_quota_cores": self.quota.to_json(),
            "cpu_count": os.cpu_count(),
            "governor": host.governor(),
            "noisy": bool(self.noisy()),
        }


def cell(place: Place, room: Room, asked: Asked) -> dict[str, Json]:
    """Measure one mode at one context."""
    from rcq_cli.engine.clock import clock_for

    arm, dense = place.candidate, place.reference
    clock = clock_for(place.device, asked.every)
    between = bandwidth.evictor(place.device) if asked.cold else profiling.nothing
    with arm.ready():
        warmth = profiling.warm_up(arm.step, asked.effort.warm_s)
        first_tokens = arm.tokens
        timed = profiling.time_phases(arm, clock, asked.effort, between)
        attribution = _attribution(arm) if asked.attribution else None
        record: dict[str, Json] = {"dense_warmup": None}
        if dense is not None:
            dense_warmth = profiling.warm_up(dense.step, asked.effort.warm_s)
            record["dense_warmup"] = dense_warmth.to_json()
            middles = (dense_warmth.steps_ns[-1], timed.steps[-1].step_ns)
            blocks = profiling.take_turns(dense, arm, asked.effort, middles, between)
            record |= profiling.ratio_record(*blocks, noisy=room.noisy())
    step_ms = profiling.step_record(timed)
    if dense is None:
        record |= {"dense_step_ms": step_ms, "ratio_to_dense": 1.0, "ratio_ci": None, "ratio": None}
    return {
        **place.facts,
        "phases": profiling.phase_rows(timed, room.ceiling, reference=dense is None),
        "step_ms": step_ms,
        **record,
        "memory": _memory(place, room),
        "bandwidth": {name: reading.value for name, reading in room.bandwidth.items()}
        | {f"{name}_source": reading.detail for name, reading in room.bandwidth.items()},
        "warmup": warmth.to_json(),
        "layers": profiling.layer_rows(timed, [_layer_of(i, state) for i, state in enumerate(arm.states)]),
        "caches": "cold" if asked.cold else "warm",
        "window": {"policy": "grow", "first_tokens": first_tokens, "last_tokens": arm.tokens},
        "clock": type(clock).__name__,
        "attribution": attribution,
    }


def _layer_of(place: int, state: Any) -> int:
    """Return the number of a layer in its model."""
    number = getattr(getattr(state, "geometry", None), "layer", None)
    return place if number is None else int(number)


def _memory(place: Place, room: Room) -> dict[str, Json]:
    from rcq_cli.engine.ledger import holdings

    states = place.candidate.states
    entries = [*holdings(states), *(place.rest.entries if place.rest else ())]
    dense = sum(state.bytes().dense_equivalent for state in states)
    dense += place.rest.dense_equivalent if place.rest else 0
    now = host.memory()
    record: dict[str, Json] = {"ledger": entries, **profiling.totals(entries, dense)}
    for name in ("vm_hwm_bytes", "rss_anon_bytes", "rss_file_bytes"):
        record |= _flat(name, now[name])
    record["peaks"] = {name: reading.to_json() for name, reading in place.peaks.items()}
    before = room.before["rss_anon_bytes"]
    if now["rss_anon_bytes"].value is not None and before.value is not None:
        record["rss_anon_delta_bytes"] = now["rss_anon_bytes"].value - before.value
    record["allocator"] = allocated(place.device).to_json()
    record["nvml"] = _nvml(place.device).to_json()
    return record


def _flat(name: str, reading: Reading) -> dict[str, Json]:
    if reading.value is None:
        return {name: None, f"{name}_status": str(reading.status)}
    return {name: reading.value}


def allocated(device: str) -> Reading:
    """Return the peak of torch's allocator on `device`; on a CPU torch would say 0, which is not true."""
    import torch

    if not device.startswith("cuda"):
        return absent(
            Status.NOT_APPLICABLE,
            "torch.allocator",
            "torch counts no memory of the CPU; see the ledger and RssAnon",
        )
    return Reading(torch.cuda.max_memory_allocated(device), Status.OK, "torch.allocator")


def _nvml(device: str) -> Reading:
    from rcq_cli.telemetry.nvml import process_bytes

    return process_bytes(device)


def _attribution(arm: Stepper, steps: int = 4) -> list[dict[str, Json]]:
    """Return the operations of a few steps under torch's profiler: names and shares, never a latency."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(steps):
            arm.step()
    events = sorted(found.key_averages(), key=lambda e: -e.self_cpu_time_total)
    total = sum(event.self_cpu_time_total for event in events) or 1.0
    return [
        {"operation": e.key, "share": e.self_cpu_time_total / total, "calls": e.count / steps}
        for e in events[:15]
    ]


def require_known(names: Sequence[str], device: str) -> None:
    """Raise `UnsupportedHere` for a reading of which it is known before any work that it cannot be had."""
    from rcq_cli.models._loading import pick_device

    now = host.memory()
    known = {**now, "rss_anon_delta_bytes": now["rss_anon_bytes"]}
    if pick_device(device).type == "cpu":  # what a GPU says counts only once the model is there
        known |= {"nvml": _nvml("cpu"), "allocator": allocated("cpu")}
    for name in names:
        if name in known and known[name].value is None:
            raise _absent(name, str(known[name].status))


def _absent(name: str, status: str) -> UnsupportedHere:
    return UnsupportedHere(
        f"--require {name}: this machine gives no such reading",
        why=status,
        fix="rcq doctor shows what is there; leave --require out",
        id="RCQ-ENV-06",
    )


def require(cells: Sequence[Mapping[str, Json]], names: Sequence[str]) -> None:
    """Raise `UnsupportedHere` when a reading that must be there is not."""
    for name in names:
        for one in cells:
            found = one["memory"].get(name)
            status = (
                found.get("status") if isinstance(found, Mapping) else one["memory"].get(f"{name}_status")
            )
            value = found.get("value") if isinstance(found, Mapping) else found
            if value is None:
                raise _absent(name, f"{status or 'not measured'}")


# -- whole models -------------------------------------------------------------------------------------------


def model_places(shell: Shell, plan: Plan) -> Iterator[Place]:
    """Yield a place per context and mode of a plan; models are loaded once, prompts prefilled once."""
    from rcq_cli.executors.local import Benches

    benches = Benches()
    for batch in plan.batches:
        yield from _places_of(shell, batch, benches)


def _places_of(shell: Shell, batch: Sequence[RunSpec], benches: Any) -> Iterator[Place]:
    from rcq_cli.engine.ledger import of_model
    from rcq_cli.engine.stepper import ModelStepper
    from rcq_cli.identity import device_of
    from rcq_cli.options import parse_options
    from rcq_cli.presets import MODES
    from rcq_cli.run import check

    first = batch[0]
    shell.say(f"{first.model}: loading")
    host.reset_peak()
    bench = benches(first)
    check(tuple(batch), bench.loaded)
    peaks = {"load": host.memory()["vm_hwm_bytes"]}
    sample = _sample(first, bench.loaded)
    modes = []
    for spec in batch:
        mode = MODES.load(spec.mode_name)
        options: Any = parse_options(mode.Options, spec.mode_options, f"option of mode {spec.mode_name}")
        modes.append((mode, options))
    dense = MODES.load("dense")
    shell.say(f"{first.model}: prefill of {sample.context_len} tokens")
    host.reset_peak()
    prefill = bench.engine.prefill(sample.prompt_ids[: sample.context_len], modes)
    peaks["prefill"] = host.memory()["vm_hwm_bytes"]
    forced = sample.prompt_ids[1:]
    for spec, (mode, options) in zip(batch, modes, strict=True):
        shell.say(f"{first.model}: {spec.mode} at {first.ctx} tokens")
        host.reset_peak()
        arm = ModelStepper(bench.engine, prefill, sample, mode, options, forced)
        backend = bench.engine.backend_name
        reference = None
        if mode.label != "reference":
            reference = ModelStepper(bench.engine, prefill, sample, dense, dense.Options(), forced)
        facts = {
            "task": spec.task,
            "ctx": spec.ctx,
            "mode": spec.mode,
            "model": spec.model,
            "dtype": bench.loaded.fingerprint.get("model.dtype"),
            "backend": backend,
            "threads": _threads(),
            "prefill_ms": prefill.ns / 1e6,
        }
        rest = of_model(bench.engine.model, arm.cache)
        yield Place(facts, arm, reference, device_of(bench.loaded), rest, peaks)


def _sample(spec: RunSpec, loaded: Any) -> Any:
    from rcq_cli.identity import task_options, task_parts
    from rcq_cli.presets import TASKS
    from rcq_cli.protocols import TaskRequest

    task = TASKS.load(spec.task_name)
    options, part = task_options(task, spec, loaded), task_parts(task, spec)[0]
    request = TaskRequest(part, spec.ctx or 0, 1, spec.seed, options)
    return next(iter(task.samples(request, loaded.tokenizer)))


def _threads() -> int:
    import torch

    return torch.get_num_threads()


# -- one layer ----------------------------------------------------------------------------------------------


def layer_places(shell: Shell, name: str, plan: Plan, dtype: str) -> Iterator[Place]:
    """Yield a place per context and mode for one layer of a known geometry, without a model."""
    import torch

    from rcq_cli.engine.synthetic import GEOMETRIES, layer_geometry, open_dense, open_layer, topics
    from rcq_cli.options import parse_options
    from rcq_cli.presets import MODES

    for batch in plan.batches:
        for spec in batch:
            tokens = spec.ctx or 0
            shell.say(f"one layer of {name}: {spec.mode} at {tokens} tokens")
            device = "cuda" if spec.device.startswith("cuda") else "cpu"
            geometry = layer_geometry(name, dtype, device)
            fed = topics(GEOMETRIES[name], tokens, getattr(torch, dtype), spec.seed)
            mode = MODES.load(spec.mode_name)
            options: Any = parse_options(mode.Options, spec.mode_options, f"option of mode {spec.mode_name}")
            host.reset_peak()
            arm, backend = open_layer(geometry, fed, tokens, mode, options, spec.backend)
            dense, variant = open_dense(geometry, fed, tokens)
            facts = {
                "task": None,
                "ctx": tokens,
                "mode": spec.mode,
                "model": None,
                "geometry": name,
                "dtype": dtype,
                "backend": backend,
                "dense_variant": None if mode.label == "reference" else variant,
                "threads": _threads(),
            }
            peaks = {"prefill": host.memory()["vm_hwm_bytes"]}
            yield Place(facts, arm, dense if mode.label != "reference" else None, device, None, peaks)
