"""From flags, settings file and preset to run specs, with the origin of each value."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from rcq_cli.errors import SpecError, UnknownEntry
from rcq_cli.options import options_dict, parse_options, parse_tokens, split_label, split_pairs
from rcq_cli.protocols import Mode, Task
from rcq_cli.registry import Registry, did_you_mean
from rcq_cli.settings import Settings, load_preset, load_settings
from rcq_cli.spec import DTYPES, RunSpec, is_file_name
from rcq_cli.task_files import TaskRegistry, name_on_command_line

TASKS: Registry[Task] = TaskRegistry("rcq_cli.tasks", "TASK", "task")
MODES: Registry[Mode] = Registry("rcq_cli.modes", "MODE", "mode")
BACKENDS: Registry[Any] = Registry("rcq_cli.kernels", "BACKEND", "backend")

Batch = tuple[RunSpec, ...]
"""Specs that differ in mode only, so they share prompts and prefills; the first is the reference."""

_DEFAULTS: dict[str, Any] = {
    "model": "needle",
    "tasks": ["niah"],
    "ctx": ["4k"],
    "mode": "certified",
    "seed": 0,
    "backend": "auto",
    "device": "auto",
    "dtype": "auto",
    "audit": 0.0,
    "out": "runs",
    "executor": "local",
}


@dataclass(frozen=True, slots=True)
class Flags:
    """What the command line gave; None or empty where a flag was not given."""

    modes: tuple[str, ...] = ()
    """Labels: the positional arguments of compare that are modes, or the one `--mode`."""
    model: str | None = None
    tasks: tuple[str, ...] = ()
    ctx: tuple[str, ...] = ()
    """Sizes as typed: `64k`."""
    samples: int | None = None
    seed: int | None = None
    backend: str | None = None
    device: str | None = None
    dtype: str | None = None
    preset: str | None = None
    audit: float | None = None
    out: str | None = None
    executor: str | None = None
    workers: int | None = None
    address: str | None = None
    shard: str | None = None
    keep_prompts: bool = False
    mode_options: tuple[str, ...] = ()
    """`-O` texts, `key=value`."""
    task_options: tuple[str, ...] = ()
    """`-T` texts, `key=value`."""

    @property
    def choose_work(self) -> bool:
        """Whether any flag says what is to be measured."""
        return any((self.model, self.tasks, self.ctx, self.samples, self.preset, self.task_options))


class Plan(NamedTuple):
    """What a command will run."""

    batches: tuple[Batch, ...]
    notes: tuple[str, ...]
    out: Path
    executor: str
    workers: int | None = None
    """Processes of an executor that has several; None for its own choice."""
    address: str | None = None
    """Cluster that an executor joins; None for this machine."""


class Chosen(NamedTuple):
    """A value and where it came from."""

    value: Any
    origin: str


def resolve(command: str, flags: Flags, *, folder: Path | None = None) -> Plan:
    """Return the runs that `command` (eval, compare, profile, trace) means with `flags`.

    Order of precedence: flag, settings file (looked for from `folder` upwards), preset, default. `compare`
    takes the preset `smoke` when no flag says what to measure. Raises `SpecError` for what does not fit.
    """
    for task in flags.tasks:
        name_on_command_line(task)
    return _Resolver(command, flags, _with_full_names(load_settings(folder or Path.cwd()))).plan()


@dataclass(slots=True)
class _Resolver:
    """One resolution: the three layers and what they become."""

    command: str
    flags: Flags
    settings: Settings
    preset: str | None = None
    fallback: Settings = field(default_factory=lambda: Settings({}, ""))
    """What the preset gives."""
    notes: list[str] = field(default_factory=list)

    def plan(self) -> Plan:
        self._choose_preset()
        labels = [self._mode(label) for label in self._labels()]
        _check_different(labels)
        batches = []
        for name in _listed(self.pick("tasks").value):
            full = _full_name(name)
            task = TASKS.load(_entry_of(full))
            _check_modes(task, labels)
            for ctx in self._contexts(task, full):
                batches.append(tuple(self._spec(task, full, ctx, mode) for mode in labels))
        self._check_flag_options(batches)
        return Plan(
            tuple(batches),
            tuple(self.notes),
            Path(self.pick("out").value),
            self.pick("executor").value,
            self.pick("workers").value,
            self.pick("address").value,
        )

    def pick(self, name: str) -> Chosen:
        """Return the value of `name` from the first layer that has it."""
        given = getattr(self.flags, name, None)
        if given not in (None, ()):
            return Chosen(given, "flag")
        for origin, layer in self._layers.items():
            if name in layer.values:
                return Chosen(layer.values[name], origin)
        return Chosen(_DEFAULTS.get(name), "default")

    def _choose_preset(self) -> None:
        chosen: str | None = self.flags.preset or self.settings.values.get("preset")
        if chosen is None and self.command == "compare" and not self.flags.choose_work:
            chosen = "smoke"
        if chosen is None:
            return
        self.preset, self.fallback = chosen, _with_full_names(load_preset(chosen))
        for name in self.fallback.values.get("needs", ()):
            if self.pick(name).origin == "default":
                raise SpecError(f"preset {chosen} needs --{name}", fix=f"add --{name} NAME", id="RCQ-USE-09")
        self.notes.append(f"preset {chosen}: {self.fallback.values.get('summary', '')}".rstrip(": "))

    def _labels(self) -> list[str]:
        if self.command != "compare":
            label = Chosen(self.flags.modes[0], "flag") if self.flags.modes else self.pick("mode")
            return [label.value]
        return _listed(self.pick("modes").value or ())

    def _mode(self, label: str) -> tuple[str, dict[str, Any], dict[str, str]]:
        """Return the label with the full name, every option of the mode, and the origin of those given."""
        typed, own = split_label(label)
        name = MODES.resolve(typed)
        mode = MODES.load(name)
        flag = _known(
            mode.Options, split_pairs(self.flags.mode_options, "-O"), strict=self.command != "compare"
        )
        layers = (*self._tables("mode_options", name), ("flag", flag), ("flag", own))
        given, origins = _merge(layers)
        options: Any = parse_options(mode.Options, given, f"option of mode {name}", self._places(origins))
        rest = label.partition(":")[2].strip()
        return f"{name}:{rest}" if rest else name, options_dict(options), origins

    def _contexts(self, task: Task, name: str) -> list[int | None]:
        if task.minimum_ctx == 0:  # a task without a model has no context either
            if self.flags.model or self.flags.ctx:
                raise SpecError(
                    f"task {name} uses no model", fix="leave out --model and --ctx", id="RCQ-USE-09"
                )
            return [None]
        chosen = self.pick("ctx")
        texts = ["8k"] if chosen.origin == "default" and self.command == "profile" else _listed(chosen.value)
        sizes = list(dict.fromkeys(map(parse_tokens, texts)))
        for size in sizes:
            if size < task.minimum_ctx:
                what = f"--ctx {size} is below the minimum of task {name}"
                raise SpecError(what, fix=f"allowed: {task.minimum_ctx} or more", id="RCQ-USE-10")
        return list(sizes)

    def _spec(
        self, task: Task, name: str, ctx: int | None, mode: tuple[str, dict[str, Any], dict[str, str]]
    ) -> RunSpec:
        label, mode_options, mode_origins = mode
        options, task_origins, controls = self._task_options(task, name)
        if options.get("longest", 0) is None:  # targets shared by the contexts must fit the longest of them
            options["longest"] = max(size for size in self._contexts(task, name) if size is not None)
        plain = {key: self.pick(key) for key in ("model", "seed", "backend", "device", "dtype", "audit")}
        samples = self._samples(task, name)
        origins = {key: chosen.origin for key, chosen in plain.items()} | {"samples": samples.origin}
        origins |= {
            "task": self.pick("tasks").origin,
            "ctx": self.pick("ctx").origin,
            "mode": self._mode_origin(),
        }
        origins |= {f"task_options.{key}": origin for key, origin in task_origins.items()}
        origins |= {f"mode_options.{key}": origin for key, origin in mode_origins.items()}
        spec = RunSpec(
            model="none" if ctx is None else plain["model"].value,
            task=name,
            mode=label,
            ctx=ctx,
            samples=samples.value,
            task_options=options,
            mode_options=mode_options,
            seed=plain["seed"].value,
            backend=_backend(plain["backend"].value),
            device=_device(plain["device"].value),
            dtype=_dtype(plain["dtype"].value),
            audit=plain["audit"].value,
            controls=controls,
            keep_prompts=self.flags.keep_prompts,
            preset=self.preset,
            shard=self.flags.shard,
            origins=origins,
        )
        if spec.shard_place[1] > spec.samples:  # some would be empty, and no run without samples counts
            what = f"--shard {spec.shard} makes more parts than {name} has samples"
            raise SpecError(what, fix=f"allowed: at most {spec.samples} parts", id="RCQ-USE-07")
        return spec

    def _mode_origin(self) -> str:
        return (
            "flag" if self.flags.modes else self.pick("modes" if self.command == "compare" else "mode").origin
        )

    def _task_options(self, task: Task, name: str) -> tuple[dict[str, Any], dict[str, str], bool]:
        """Return every option of the task, the origin of those given, and whether controls run."""
        entry = _entry_of(name)
        alone = len(_listed(self.pick("tasks").value)) == 1
        flag = split_pairs(self.flags.task_options, "-T")
        controls = str(flag.pop("controls", "on")).lower()
        if controls not in ("on", "off"):
            raise SpecError(f"controls={controls} is not allowed", fix="allowed: on, off", id="RCQ-USE-06")
        layers = (*self._tables("task_options", entry), ("flag", _known(task.Options, flag, strict=alone)))
        given, origins = _merge(layers)
        options: Any = parse_options(task.Options, given, f"option of task {entry}", self._places(origins))
        return options_dict(options), origins, controls == "on"

    @property
    def _layers(self) -> dict[str, Settings]:
        """Return what stands below the flags by its origin, the stronger layer first."""
        return {"file": self.settings, "preset": self.fallback}

    def _tables(self, group: str, name: str) -> tuple[tuple[str, Mapping[str, Any]], ...]:
        """Return what preset and file give a mode or a task, the stronger one last."""
        layers = reversed(self._layers.items())
        return tuple((origin, layer.values.get(group, {}).get(name, {})) for origin, layer in layers)

    def _places(self, origins: Mapping[str, str]) -> dict[str, str]:
        """Return for each option that no flag gave where it stands."""
        layers = self._layers
        return {name: layers[origin].where for name, origin in origins.items() if origin in layers}

    def _samples(self, task: Task, name: str) -> Chosen:
        chosen = self.pick("samples")
        value = chosen.value
        if isinstance(value, Mapping):
            value = value.get(name, value.get(_entry_of(name)))
        if value is not None:
            return Chosen(value, chosen.origin)
        sizes = task.default_samples
        if self.preset is not None and self.preset in sizes:
            return Chosen(sizes[self.preset], "preset")
        return Chosen(sizes[""], "default")

    def _check_flag_options(self, batches: list[Batch]) -> None:
        """Refuse a `-O` or `-T` that no mode or task took."""
        specs = [spec for batch in batches for spec in batch]
        for flag, texts, group in (
            ("-O", self.flags.mode_options, "mode"),
            ("-T", self.flags.task_options, "task"),
        ):
            known = sorted(
                {key for spec in specs for key in getattr(spec, f"{group}_options")} | (_EXTRA[group])
            )
            for key in split_pairs(texts, flag):
                if key.replace("-", "_") not in known:
                    names = ", ".join(dict.fromkeys(getattr(spec, f"{group}_name") for spec in specs))
                    hint = did_you_mean(key, tuple(known))
                    what = f"{flag} {key!r} is no option of {names}"
                    raise SpecError(what, fix=f"{hint}known: {', '.join(known) or 'none'}", id="RCQ-USE-05")


_EXTRA = {"mode": set[str](), "task": {"controls"}}


def _known(cls: type, given: Mapping[str, str], *, strict: bool) -> dict[str, str]:
    """Return what of `given` the options class has; all of it when `strict`, so that the rest is refused."""
    from dataclasses import fields

    names = {f.name for f in fields(cls)}
    return {key: value for key, value in given.items() if strict or key.replace("-", "_") in names}


def _merge(layers: Iterable[tuple[str, Mapping[str, Any]]]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return options and their origins; a later layer wins."""
    given: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, options in layers:
        for key, value in options.items():
            name = key.replace("-", "_")
            given[name], origins[name] = value, origin
    return given, origins


def _with_full_names(layer: Settings) -> Settings:
    """Return the layer, tables by task or mode under full names; raise `SpecError` for what names none."""
    values = dict(layer.values)
    for key, full_name in (
        ("samples", _full_name),
        ("task_options", TASKS.resolve),
        ("mode_options", MODES.resolve),
    ):
        if isinstance(values.get(key), Mapping):
            try:
                values[key] = {full_name(name): entry for name, entry in values[key].items()}
            except UnknownEntry as error:
                what = f"{key} in {layer.where}: {error.what}"
                raise SpecError(what, fix=error.fix, id="RCQ-USE-08") from error
    return layer._replace(values=values)


def _full_name(name: str) -> str:
    """Return the task that `name` means as runs call it: `ruler/vt`, of a task that is a file its path."""
    typed, slash, part = (name, "", "") if is_file_name(name) else name.partition("/")
    entry = TASKS.resolve(typed)
    if slash and part not in TASKS.load(entry).parts:
        parts = tuple(filter(None, TASKS.load(entry).parts))
        known = f"known: {', '.join(parts)}" if parts else "it has none"
        raise UnknownEntry(
            f"task {entry} has no part {part!r}", fix=did_you_mean(part, parts) + known, id="RCQ-USE-01"
        )
    return f"{entry}/{part}" if part else entry


def _entry_of(name: str) -> str:
    """Return the registry name of a task with or without its part."""
    return name if is_file_name(name) else name.partition("/")[0]


def _check_different(modes: Sequence[tuple[str, Mapping[str, Any], Any]]) -> None:
    """Refuse a mode that stands twice, however its options are spelled or left at their defaults."""
    seen: list[tuple[str, Mapping[str, Any]]] = []
    for label, options, _ in modes:
        mode = _cut(label)[0], options
        if mode in seen:
            same = modes[seen.index(mode)][0]
            why = "" if same == label else f"with these options it is {same!r}"
            raise SpecError(
                f"mode {label!r} is compared with itself", why, "name each mode once", "RCQ-USE-09"
            )
        seen.append(mode)


def _check_modes(task: Any, labels: Iterable[tuple[str, Any, Any]]) -> None:
    """Refuse a mode that a task without a model cannot run."""
    if task.minimum_ctx:
        return
    for label, _, _ in labels:
        if _cut(label)[0] not in task.modes:
            raise SpecError(
                f"mode {_cut(label)[0]} has no selection policy for task {task.name}",
                fix=f"allowed: {', '.join(task.modes)}",
                id="RCQ-USE-09",
            )


def _cut(label: str) -> tuple[str, str, str]:
    return label.strip().partition(":")


def _listed(value: Any) -> list[str]:
    """Return a list of texts from a tuple of flags, a list of a file, one text or one number."""
    if isinstance(value, str | int):
        value = str(value).split(",")
    return [str(part).strip() for part in value]


def _backend(name: str) -> str:
    return name if name == "auto" else BACKENDS.resolve(name)


def _device(name: str) -> str:
    if re.fullmatch(r"auto|split|cpu|cuda(:\d+)?", name):
        return name
    raise SpecError(
        f"--device {name!r} is not allowed", fix="allowed: auto, cpu, cuda, cuda:0, split", id="RCQ-USE-07"
    )


def _dtype(name: str) -> str:
    if name in DTYPES:
        return name
    hint = did_you_mean(name, DTYPES)
    raise SpecError(
        f"--dtype {name!r} is not allowed", fix=f"{hint}allowed: {', '.join(DTYPES)}", id="RCQ-USE-07"
    )
