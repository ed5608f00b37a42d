"""The flags that mean the same everywhere, and how they become `Flags`; only Typer is imported here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rcq_cli.errors import SpecError
from rcq_cli.registry import did_you_mean

if TYPE_CHECKING:
    from rcq_cli.presets import Flags
    from rcq_cli.shell import Shell

Model = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="NAME",
        help="Built-in name, Hugging Face id, local folder or .gguf file; its options as name:key=value. "
        "[default: needle]",
    ),
]
Task = Annotated[
    list[str] | None,
    typer.Option(
        "--task", metavar="NAMES", help="Tasks, comma list; task/part for one part. [default: niah]"
    ),
]
Ctx = Annotated[
    list[str] | None,
    typer.Option("--ctx", metavar="TOKENS", help="Contexts, comma list: 64k is 65536, 1m. [default: 4k]"),
]
ModeName = Annotated[
    str | None,
    typer.Option("--mode", metavar="NAME", help="How the cache is kept and read. [default: certified]"),
]
Samples = Annotated[
    str | None, typer.Option("--samples", metavar="N", help="Samples per cell. [default: the task's]")
]
Seed = Annotated[str | None, typer.Option("--seed", metavar="N", help="Seed of the prompts. [default: 0]")]
Backend = Annotated[
    str | None,
    typer.Option(
        "--backend", metavar="NAME", help="Who computes: auto, reference, cpu, triton. [default: auto]"
    ),
]
Device = Annotated[
    str | None,
    typer.Option("--device", metavar="NAME", help="auto, cpu, cuda, cuda:I, or split: over all of them."),
]
Dtype = Annotated[
    str | None,
    typer.Option("--dtype", metavar="NAME", help="auto, float32, bfloat16 or float16, of the model."),
]
Preset = Annotated[str | None, typer.Option("--preset", metavar="NAME", help="smoke, ci, release ...")]
ModeOption = Annotated[
    list[str] | None,
    typer.Option("-O", metavar="KEY=VALUE", help="Option of the mode, repeatable; see rcq modes NAME."),
]
TaskOption = Annotated[
    list[str] | None,
    typer.Option("-T", metavar="KEY=VALUE", help="Option of the task, repeatable; see rcq tasks NAME."),
]
Executor = Annotated[
    str | None, typer.Option("--executor", metavar="NAME", help="Who runs the cells. [default: local]")
]
Workers = Annotated[
    str | None,
    typer.Option(
        "--workers",
        metavar="N",
        help="Processes of --executor ray, each with the model. [default: one per GPU, two on a CPU]",
    ),
]
Address = Annotated[
    str | None,
    typer.Option("--address", metavar="HOST:PORT", help="A Ray cluster for --executor ray; auto finds one."),
]
Out = Annotated[
    str | None, typer.Option("--out", metavar="DIR", help="Where run folders go. [default: runs]")
]
Resume = Annotated[
    bool,
    typer.Option("--resume/--fresh", help="Go on with the newest run of the same spec, or start a new one."),
]
Audit = Annotated[
    str | None,
    typer.Option(
        "--audit",
        metavar="[SHARE]",
        help="Recompute this share of the steps exactly and count violated bounds; alone: every step.",
    ),
]
MaxErrors = Annotated[
    str, typer.Option("--max-errors", metavar="N", help="Failed samples that a run may have and still count.")
]
KeepPrompts = Annotated[
    bool, typer.Option("--keep-prompts", help="Store the text and the token ids of every prompt.")
]
AllowInactive = Annotated[
    bool, typer.Option("--allow-inactive", help="Accept samples in which the mode did nothing.")
]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Show what would run, the bytes and the time expected, and stop.")
]
Format = Annotated[str, typer.Option("-o", metavar="FORMAT", help="table, json, jsonl, md or csv on stdout.")]
JsonTarget = Annotated[
    str | None,
    typer.Option("--json", metavar="[PATH]", help="The JSON document to PATH; without one to stdout, alone."),
]
Quiet = Annotated[bool, typer.Option("-q", "--quiet", help="The result only; warnings and errors stay.")]
Verbose = Annotated[bool, typer.Option("-v", "--verbose", help="More on stderr: where each value came from.")]

FLAG_NAMES = (
    "model",
    "task",
    "ctx",
    "samples",
    "seed",
    "backend",
    "device",
    "dtype",
    "preset",
    "audit",
    "out",
    "executor",
    "workers",
    "address",
    "shard",
    "keep_prompts",
    "mode_option",
    "task_option",
)
"""Parameters of a command that say what is asked, by the names of `flags_of`."""


def words(values: Sequence[str] | None, flag: str) -> tuple[str, ...]:
    """Split repeated comma lists into their entries, repetitions left out; raise `SpecError` for a blank."""
    parts = {value: [part.strip() for part in value.split(",")] for value in values or ()}
    blank = next((value for value, found in parts.items() if not all(found)), None)
    if blank is not None:
        what = f"{flag} {blank!r} has an empty entry"
        raise SpecError(what, fix="allowed: one, or several with a comma between them", id="RCQ-USE-02")
    return tuple(dict.fromkeys(part for found in parts.values() for part in found))


def share_of(text: str | None, flag: str) -> float | None:
    """Return the share a flag's text means; raise `SpecError` for anything but a number from 0 to 1."""
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= 1.0:
        raise SpecError(
            f"{flag} {text!r} is not allowed", fix="allowed: a share from 0 to 1", id="RCQ-USE-07"
        )
    return value


def whole(text: str | int | None, flag: str, low: int) -> int | None:
    """Return the whole number a flag's text means; raise `SpecError` for anything else or less than `low`."""
    if text is None:
        return None
    try:
        value = int(text)
    except ValueError:
        raise SpecError(
            f"{flag} {text!r} is no whole number", fix=f"allowed: {low} or more", id="RCQ-USE-07"
        ) from None
    if value < low:
        raise SpecError(f"{flag} {value} is not allowed", fix=f"allowed: {low} or more", id="RCQ-USE-07")
    return value


def between(text: str | None, flag: str, high: float, least: float = 0.0) -> float | None:
    """Return the number a flag's text means.

    Raises `SpecError` unless it lies above 0, not below `least`, and below `high`.
    """
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (0 < value < high and value >= least):
        what = f"{flag} {text!r} is not allowed"
        raise SpecError(what, fix=f"allowed: a number between {least:g} and {high:g}", id="RCQ-USE-07")
    return value


def flags_of(modes: tuple[str, ...] = (), **given: Any) -> Flags:
    """Return the `Flags` of the values Typer parsed, checked one by one as far as a single value can be."""
    from rcq_cli.presets import Flags

    return Flags(
        modes=modes,
        model=given.get("model"),
        tasks=words(given.get("task"), "--task"),
        ctx=words(given.get("ctx"), "--ctx"),
        samples=whole(given.get("samples"), "--samples", 1),
        seed=whole(given.get("seed"), "--seed", 0),
        backend=given.get("backend"),
        device=given.get("device"),
        dtype=given.get("dtype"),
        preset=given.get("preset"),
        audit=share_of(given.get("audit"), "--audit"),
        out=given.get("out"),
        executor=given.get("executor"),
        workers=whole(given.get("workers"), "--workers", 1),
        address=given.get("address"),
        shard=given.get("shard"),
        keep_prompts=bool(given.get("keep_prompts")),
        mode_options=tuple(given.get("mode_option") or ()),
        task_options=tuple(given.get("task_option") or ()),
    )


def work_of(given: dict[str, Any]) -> dict[str, Any]:
    """Return the flags among `given` that say what is to be measured, and how that is to go on."""
    names = (*FLAG_NAMES, "mode", "match", "resume", "dry_run")
    return {name: given[name] for name in names if given.get(name)}


def refuse_work(asked: dict[str, Any], where: str) -> None:
    """Raise `SpecError` when flags that say what to measure stand where everything is measured already."""
    if asked:
        name = next(iter(asked))
        flag = {"mode_option": "-O", "task_option": "-T"}.get(name, "--" + name.replace("_", "-"))
        raise SpecError(f"{flag} has no meaning {where}", fix=f"leave {flag} out", id="RCQ-USE-02")


def choose(value: str, allowed: Sequence[str], flag: str) -> str:
    """Return `value` when it is one of `allowed`; raise `SpecError` with the near match otherwise."""
    if value not in allowed:
        hint = did_you_mean(value, tuple(allowed))
        raise SpecError(
            f"{flag} {value!r} is not allowed", fix=f"{hint}allowed: {', '.join(allowed)}", id="RCQ-USE-02"
        )
    return value


def shell_of(ctx: typer.Context) -> Shell:
    """Return the shell that the program put into the context."""
    shell: Shell = ctx.obj
    return shell
