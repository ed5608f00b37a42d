from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Literal

import pytest

from rcq_cli import presets
from rcq_cli.errors import SpecError, UnknownEntry
from rcq_cli.presets import Flags, resolve
from rcq_cli.registry import Registry
from rcq_cli.settings import load_preset, load_settings, preset_names


@dataclass(frozen=True)
class NeedleOptions:
    decoys: int | Literal["auto"] = "auto"
    payload: str = "digits"
    gen: int = 48


@dataclass(frozen=True)
class RulerOptions:
    words: int = 3


@dataclass(frozen=True)
class TextOptions:
    target_tokens: int = 32


@dataclass(frozen=True)
class NoOptions:
    pass


@dataclass(frozen=True)
class CertifiedOptions:
    eps: float = 0.05
    block: int = 16


def task(options, parts=("",), minimum=512, samples=None):
    sizes = samples or {"": 22, "smoke": 22, "ci": 110, "release": 550}
    return SimpleNamespace(
        parts=parts, Options=options, minimum_ctx=minimum, default_samples=sizes, modes=("certified", "dense")
    )


@dataclass(frozen=True)
class Stubs(Registry):
    entries: dict = field(default_factory=dict)

    def names(self):
        return tuple(sorted(self.entries))

    def load(self, name):
        return self.entries[self.resolve(name)]


@pytest.fixture(autouse=True)
def entries(monkeypatch, tmp_path):
    tasks = {
        "niah": task(NeedleOptions),
        "ruler": task(RulerOptions, parts=("cwe", "vt"), minimum=1024, samples={"": 5, "ci": 20}),
        "ppl": task(TextOptions, samples={"": 4}),
        "recas-traces": task(NoOptions, minimum=0, samples={"": 1000, "smoke": 8}),
    }
    modes = {
        "dense": SimpleNamespace(Options=NoOptions),
        "naive": SimpleNamespace(Options=NoOptions),
        "certified": SimpleNamespace(Options=CertifiedOptions),
        "certified-paper": SimpleNamespace(Options=CertifiedOptions),
    }
    backends = {"cpu": None, "reference": None, "triton-fused": None}
    monkeypatch.setattr(presets, "TASKS", Stubs("", "", "task", tasks))
    monkeypatch.setattr(presets, "MODES", Stubs("", "", "mode", modes))
    monkeypatch.setattr(presets, "BACKENDS", Stubs("", "", "backend", backends))
    monkeypatch.delenv("RCQ_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)


def plan(command="eval", folder=None, **flags):
    return resolve(command, Flags(**flags), folder=folder)


def only(plan):
    ((spec,),) = plan.batches
    return spec


def settings(tmp_path, text, name="rcq.toml"):
    (tmp_path / name).write_text(text)
    return tmp_path


def test_eval_without_flags_is_the_documented_default():
    spec = only(plan())
    assert (spec.model, spec.mode, spec.task, spec.ctx, spec.seed) == ("needle", "certified", "niah", 4096, 0)
    assert (spec.samples, spec.audit, spec.backend, spec.device, spec.dtype) == (
        22,
        0.0,
        "auto",
        "auto",
        "auto",
    )
    assert spec.task_options == {"decoys": "auto", "payload": "digits", "gen": 48}
    assert spec.mode_options == {"eps": 0.05, "block": 16}
    assert set(spec.origins.values()) == {"default"}


def test_profile_measures_at_8k():
    assert only(plan("profile")).ctx == 8192


def test_compare_without_flags_is_the_smoke_preset():
    found = plan("compare", modes=("dense", "naive", "certified"))
    assert [[s.mode for s in batch] for batch in found.batches] == [["dense", "naive", "certified"]] * 2
    assert [batch[0].ctx for batch in found.batches] == [1024, 4096]
    first = found.batches[0][0]
    assert (first.model, first.task, first.samples, first.preset) == ("needle-hard", "niah", 22, "smoke")
    assert found.notes[0].startswith("preset smoke")


def test_compare_that_says_what_to_measure_takes_no_preset():
    spec = plan("compare", modes=("dense", "naive"), tasks=("niah",)).batches[0][0]
    assert (spec.preset, spec.model) == (None, "needle")


def test_compare_keeps_smoke_when_only_the_mode_is_set():
    found = plan("compare", modes=("dense", "certified"), mode_options=("eps=0.1",), audit=1.0)
    assert found.batches[0][1].mode_options["eps"] == 0.1
    assert found.batches[0][0].preset == "smoke"


def test_batches_differ_in_mode_only():
    found = plan("compare", modes=("dense", "naive"), tasks=("niah", "ruler"), ctx=("4k", "8k"))
    assert [(b[0].task, b[0].ctx) for b in found.batches] == [
        ("niah", 4096),
        ("niah", 8192),
        ("ruler", 4096),
        ("ruler", 8192),
    ]
    for batch in found.batches:
        assert len({s.but(mode="any", mode_options={}).digest() for s in batch}) == 1


@pytest.mark.parametrize(
    ("modes", "message"),
    [
        (("dense", "dense"), "compared with itself"),
        (("certified:eps=0.1", "certified:eps=0.1"), "compared with itself"),
        (
            ("dense", "certified:eps=0.1", "certified:eps=1e-1"),
            "compared with itself; .* 'certified:eps=0.1'",
        ),
        (("dense", "certified:eps=0.1,block=32", "certified:block=32,eps=0.1"), "compared with itself"),
    ],
)
def test_a_mode_is_not_compared_with_itself(modes, message):
    with pytest.raises(SpecError, match=message):
        plan("compare", modes=modes)


def test_a_default_that_is_written_out_makes_no_other_mode():
    written = f"certified:eps={presets.MODES.load('certified').Options().eps}"
    with pytest.raises(SpecError, match=rf"mode '{written}' is compared with itself; .* 'certified'"):
        plan("compare", modes=("dense", "certified", written))
    with pytest.raises(SpecError, match="compared with itself"):
        plan("compare", modes=("certified:eps=0.2", "certified"), mode_options=("eps=0.2",))
    assert len(plan("compare", modes=("certified", written), mode_options=("eps=0.2",)).batches[0]) == 2


def test_a_mode_may_stand_twice_with_other_options():
    found = plan("compare", modes=("certified:eps=0.1", "certified:eps=0.2"))
    assert [s.mode_options["eps"] for s in found.batches[0]] == [0.1, 0.2]
    assert [s.mode for s in found.batches[0]] == ["certified:eps=0.1", "certified:eps=0.2"]


def test_a_bare_option_goes_to_every_mode_that_has_it():
    found = plan("compare", modes=("dense", "certified", "certified-paper"), mode_options=("block=32",))
    assert [s.mode_options.get("block") for s in found.batches[0]] == [None, 32, 32]


def test_the_option_in_a_label_wins_over_a_bare_one():
    found = plan("compare", modes=("dense", "certified:eps=0.2"), mode_options=("eps=0.1",))
    assert found.batches[0][1].mode_options["eps"] == 0.2


def test_an_option_that_no_mode_has_is_refused():
    with pytest.raises(SpecError, match="'epz' is no option of dense, certified; did you mean 'eps'"):
        plan("compare", modes=("dense", "certified"), mode_options=("epz=1",))


def test_an_option_the_one_mode_lacks_is_refused():
    with pytest.raises(SpecError, match="'eps' is no option of mode dense; it has none"):
        plan(modes=("dense",), mode_options=("eps=1",))


def test_a_task_option_goes_to_every_task_that_has_it():
    found = plan(tasks=("niah", "ruler"), task_options=("decoys=3",))
    assert [b[0].task_options.get("decoys") for b in found.batches] == [3, None]


def test_a_task_option_that_no_task_has_is_refused():
    with pytest.raises(SpecError, match="'decoy' is no option"):
        plan(tasks=("niah", "ruler"), task_options=("decoy=3",))


def test_controls_can_be_switched_off_for_any_task():
    assert only(plan(task_options=("controls=off",))).controls is False
    with pytest.raises(SpecError, match="controls=perhaps"):
        plan(task_options=("controls=perhaps",))


def test_a_part_of_a_task_is_a_run_of_its_own():
    assert only(plan(tasks=("ruler/vt",))).task == "ruler/vt"
    with pytest.raises(UnknownEntry, match="no part 'vx'; did you mean 'vt'"):
        plan(tasks=("ruler/vx",))
    with pytest.raises(UnknownEntry, match="no part 'x'; it has none"):
        plan(tasks=("niah/x",))


def test_a_context_below_the_minimum_names_it():
    with pytest.raises(SpecError, match=r"--ctx 512 is below.*1024 or more"):
        plan(tasks=("ruler",), ctx=("512",))


def test_a_task_without_a_model_refuses_one():
    spec = only(plan(tasks=("recas-traces",)))
    assert (spec.ctx, spec.model, spec.samples) == (None, "none", 1000)
    with pytest.raises(SpecError, match="uses no model"):
        plan(tasks=("recas-traces",), ctx=("4k",))


def test_samples_follow_the_preset_of_the_task():
    assert only(plan(preset="smoke", ctx=("1k",))).samples == 22
    assert only(plan(tasks=("ruler",))).samples == 5
    assert only(plan(samples=3)).samples == 3


def test_a_preset_may_need_a_model():
    with pytest.raises(SpecError, match="preset ci needs --model"):
        plan(preset="ci")
    found = plan(preset="ci", model="m")
    assert [(b[0].task, b[0].ctx, b[0].samples) for b in found.batches][:3] == [
        ("niah", 8192, 110),
        ("niah", 32768, 110),
        ("ruler", 8192, 20),
    ]


def test_leading_words_name_modes_and_backends():
    assert only(plan(modes=("certified-p",))).mode == "certified-paper"
    assert only(plan(backend="triton")).backend == "triton-fused"


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        ({"modes": ("certifed",)}, UnknownEntry),
        ({"tasks": ("nih",)}, UnknownEntry),
        ({"preset": "smok"}, UnknownEntry),
        ({"backend": "gpu"}, UnknownEntry),
        ({"device": "gpu"}, SpecError),
        ({"dtype": "int8"}, SpecError),
        ({"ctx": ("4g",)}, SpecError),
        ({"samples": -1}, SpecError),
        ({"seed": -1}, SpecError),
        ({"audit": 2.0}, SpecError),
        ({"shard": "3/2"}, SpecError),
        ({"shard": "1/4", "samples": 3}, SpecError),
    ],
)
def test_what_does_not_exist_is_a_usage_error(flags, error):
    with pytest.raises(error) as caught:
        plan(**flags)
    assert caught.value.exit_code == 2


def test_flag_beats_file_beats_preset(tmp_path):
    folder = settings(
        tmp_path, 'model = "from-file"\nseed = 7\n[mode_options.certified]\neps = 0.3\nblock = 8\n'
    )
    spec = plan("eval", folder, preset="smoke", seed=9, ctx=("1k",), mode_options=("block=32",)).batches[0][0]
    assert (spec.model, spec.seed, spec.ctx) == ("from-file", 9, 1024)
    assert spec.mode_options == {"eps": 0.3, "block": 32}
    assert spec.origins["model"] == "file"
    assert (spec.origins["seed"], spec.origins["task"]) == ("flag", "preset")
    assert (spec.origins["mode_options.eps"], spec.origins["mode_options.block"]) == ("file", "flag")


def test_settings_may_stand_in_pyproject_and_in_a_parent(tmp_path):
    settings(tmp_path, '[tool.rcq]\nout = "elsewhere"\n', "pyproject.toml")
    below = tmp_path / "a" / "b"
    below.mkdir(parents=True)
    assert str(plan("eval", below).out) == "elsewhere"


def test_a_pyproject_of_others_is_passed_over(tmp_path):
    settings(tmp_path, "[tool.other]\nx = 1\n", "pyproject.toml")
    assert load_settings(tmp_path).values == {}


def test_an_unknown_setting_is_refused_with_a_near_match(tmp_path):
    with pytest.raises(SpecError, match=r"unknown key 'modell'.*did you mean 'model'"):
        load_settings(settings(tmp_path, 'modell = "x"\n'))


def test_broken_settings_are_a_usage_error(tmp_path):
    with pytest.raises(SpecError, match="cannot be read"):
        load_settings(settings(tmp_path, "model = \n"))


@pytest.mark.parametrize(
    ("line", "key"), [("tool = 7", "tool"), ("tool.rcq = 7", "rcq"), ("tool.rcq = []", "rcq")]
)
def test_a_pyproject_without_a_table_is_refused(tmp_path, line, key):
    with pytest.raises(SpecError, match=rf"{key} in .*pyproject.toml is .*allowed: a table") as caught:
        load_settings(settings(tmp_path, line + "\n", "pyproject.toml"))
    assert caught.value.id == "RCQ-USE-08"


@pytest.mark.parametrize(
    "line",
    [
        *(
            f"{key} = {value}"
            for key in ("tasks", "ctx", "modes")
            for value in ("[]", '""', "[7.5]", "true", "{}")
        ),
        *("tasks = 7", 'tasks = "niah,,ruler"', "ctx = 0", "ctx = 1.5", 'modes = ["dense", 7]'),
        *(
            f"{key} = {value}"
            for key in ("model", "mode", "backend", "device", "dtype")
            for value in ("7", "[]")
        ),
        *('seed = "x"', "seed = 1.5", "seed = -1", "seed = true", 'audit = "x"', "audit = 2", "audit = nan"),
        *(
            'samples = "3"',
            "samples = 0",
            "samples = 10_000_000_000",
            'samples = {niah = "x"}',
            "samples = []",
        ),
        *('workers = "two"', "workers = 0", "task_options = 7", "mode_options = {certified = 7}"),
    ],
)
def test_a_value_of_another_kind_is_refused_with_key_file_and_what_is_allowed(tmp_path, line):
    with pytest.raises(SpecError, match=rf"{line.split()[0]} in .*rcq.toml is .*allowed: ") as caught:
        plan("eval", settings(tmp_path, line + "\n"))
    assert (caught.value.id, caught.value.exit_code) == ("RCQ-USE-08", 2)


@pytest.mark.parametrize(
    ("line", "near"),
    [
        ("samples = {niha = 3}", "niah"),
        ('samples = {"ruler/tv" = 3}', "vt"),
        ("task_options = {niha = {gen = 9}}", "niah"),
        ("mode_options = {certifed = {eps = 0.1}}", "certified"),
    ],
)
def test_a_table_by_names_has_only_names_that_are_there(tmp_path, line, near):
    with pytest.raises(SpecError, match=rf"{line.split()[0]} in .*rcq.toml.*did you mean '{near}'") as caught:
        plan("eval", settings(tmp_path, line + "\n"), samples=5)
    assert caught.value.id == "RCQ-USE-08"


@pytest.mark.parametrize(
    ("line", "what"),
    [
        ('mode_options = {certified = {eps = "x"}}', r"eps=x \(option of mode certified\) in .*rcq.toml"),
        ("mode_options = {certified = {epz = 0.1}}", r"'epz' is no option of mode certified in .*rcq.toml"),
        ("task_options = {niah = {gen = 0.5}}", r"gen=0.5 \(option of task niah\) in .*rcq.toml"),
    ],
)
def test_an_option_that_a_file_gives_is_refused_with_the_name_of_the_file(tmp_path, line, what):
    with pytest.raises(SpecError, match=what):
        plan("eval", settings(tmp_path, line + "\n"))
    with pytest.raises(SpecError) as caught:
        plan("eval", settings(tmp_path, ""), mode_options=("eps=x",))
    assert "rcq.toml" not in caught.value.what


def test_samples_by_task_may_name_a_part_and_leading_words(tmp_path):
    text = 'tasks = ["ruler/vt", "ruler/cwe", "niah"]\nsamples = {"rul/vt" = 3, ruler = 7, nia = 9}\n'
    assert [batch[0].samples for batch in plan("eval", settings(tmp_path, text)).batches] == [3, 7, 9]


def test_a_file_named_by_the_environment_must_exist(tmp_path, monkeypatch):
    monkeypatch.setenv("RCQ_CONFIG", str(tmp_path / "none.toml"))
    with pytest.raises(SpecError, match="is no file"):
        load_settings(tmp_path)


@pytest.mark.parametrize("name", ["ci", "paper", "release", "smoke"])
def test_shipped_presets_parse_and_name_what_they_are(name):
    assert name in preset_names()
    assert load_preset(name).values["summary"]


def test_the_paper_preset_has_the_sizes_of_the_paper():
    preset = load_preset("paper").values
    assert preset["ctx"] == ["8k", "32k", "64k", "128k"]
    assert preset["model"] == "meta-llama/Llama-3.1-8B"
    assert len([task for task in preset["tasks"] if task.startswith("ruler/")]) == 7
    assert preset["samples"] == {"niah": 100, "ruler": 20, "ppl": 20, "recas-traces": 1000}
    # ten depths and ten forms; targets are half the context
    niah, ppl = preset["task_options"]["niah"], preset["task_options"]["ppl"]
    assert niah == {"depths": "0:90:10", "gen": 50}
    assert ppl == {"target_tokens": "half", "targets": "independent"}


def test_origins_never_change_the_digest(tmp_path):
    by_file = plan("eval", settings(tmp_path, "seed = 3\n")).batches[0][0]
    assert by_file.digest() == only(plan("eval", tmp_path / "nowhere", seed=3)).digest()
