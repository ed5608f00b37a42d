"""What cannot work is refused at once, as its user's mistake, by a dry run as well as by the run itself."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SMALL = ("--ctx", "512", "--samples", "1")


def rcq(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "rcq_cli", *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=cwd, timeout=120)


def refused(*words: str, cwd: Path) -> str:
    """Return the message of a command that has to be refused without leaving anything."""
    before = sorted(cwd.iterdir())
    done = rcq(*words, cwd=cwd)
    assert done.returncode == 2, done.stderr
    assert sorted(cwd.iterdir()) == before
    return done.stderr


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("compare", "dense", "certified", *SMALL, "--alpha", "1e-17"), "between 1e-09 and 0.5"),
        (("compare", "dense", "certified", *SMALL, "--margin", "1e-320"), "between 1e-09 and 1"),
        (("compare", "dense", "certified", *SMALL, "--latency-margin", "1e-320"), "between 1e-09 and 100"),
        (("compare", "dense", "certified", *SMALL, "--flip-margin", "inf"), "between 1e-09 and 1"),
        (("compare", "dense", "snapkv", *SMALL, "--match", "bytes=1e-320"), "from 0.0001 to 4"),
        (("eval", "--ctx", "512", "--samples", "9" * 20), "1 to 1000000000"),
        (("eval", *SMALL, "-T", "depths=0:100:1e-9"), "at most 1001 depths"),
        (("eval", "--ctx", "1m", "--samples", "1"), "above what needle"),
        (("eval", *SMALL, "--model", "needle:layers=99999999"), "1 to 16"),
        (("compare", "dense", "certified", *SMALL, "--fail-on", "niah.acuracy.upper < 0"), "'accuracy'?"),
        (("compare", "dense", "naive", *SMALL, "--fail-on", "*.kl_mean.candidate > 1"), "accuracy, contains"),
        (("profile", "--ctx", "512", "--steps", "0"), "5 or more"),
        (("profile", "--ctx", "512", "--pairs", "0"), "2 or more"),
        (("profile", "--ctx", "512", "--require", "foo"), "vm_hwm_bytes"),
    ],
    ids=lambda given: given[0] if isinstance(given, tuple) and given else None,
)
def test_a_value_out_of_range_is_refused_before_any_work(
    tmp_path: Path, words: tuple[str, ...], said: str, dry: tuple[str, ...]
) -> None:
    assert said in refused(*words, *dry, cwd=tmp_path)


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_what_only_a_layer_of_the_model_can_tell_is_refused_before_any_work(
    tmp_path: Path, dry: tuple[str, ...]
) -> None:
    said = refused("eval", *SMALL, "-O", "group=7", *dry, cwd=tmp_path)
    assert "does not divide head dim" in said


@pytest.mark.parametrize("key", ["preset", "out", "executor", "address"])
@pytest.mark.parametrize("value", ["7", "1.5", "true", "[]", '""'])
def test_a_settings_file_with_another_kind_of_value_names_it(tmp_path: Path, key: str, value: str) -> None:
    (tmp_path / "rcq.toml").write_text(f"{key} = {value}\n")
    said = refused("eval", *SMALL, cwd=tmp_path)
    assert "RCQ-USE-08" in said
    assert key in said


@pytest.mark.parametrize(
    ("prompt", "target", "record", "said"),
    [
        ("{{q}}", "anwser", {"q": "1?", "answer": "1"}, "did you mean 'answer'?"),
        ("qq", "answer", {"q": "1?", "answer": "1"}, "did you mean 'q'?"),
        ("Say something", "answer", {"q": "1?", "answer": "1"}, "known: q, answer"),
        ("q", "answer", {"q": None, "answer": "1"}, "d.jsonl, line 1: field 'q' is null"),
        ("{{q}}", "answer", {"q": "1?", "answer": []}, "field 'answer' is [], which is no answer"),
        ("{{q}}", "{{answer}}", {"q": "1?", "answer": None}, "field 'answer' is null, which is no answer"),
        ("{{q}}", "is {{answer}}", {"q": "1?", "answer": None}, "field 'answer' is null"),
        ("{{q}}", "answer", {"q": [], "answer": "1"}, "field 'q' is [], not a text or a number"),
        ("{{q}}", "answer", {"q": {"a": 1}, "answer": "1"}, "not a text or a number"),
        ("{{q}}", "answer", {"q": " ", "answer": "1"}, "its prompt is blank"),
        ("{{q}}", "answer", {"q": "1?", "answer": [""]}, "leaves nothing that an answer could match"),
        ("{{q}}", "answer", {"q": "1?", "answer": ["1", " "]}, "leaves nothing that an answer could match"),
        ("{{q}}", "answer", {"q": "1?", "answer": [["1"]]}, "which is no answer"),
        ("{{q}}", " {{answer}}", {"q": "1?", "answer": ""}, "leaves nothing that an answer could match"),
    ],
)
def test_a_task_whose_prompts_or_answers_would_be_no_data_is_refused(
    tmp_path: Path, prompt: str, target: str, record: dict[str, object], said: str
) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps(record) + "\n")
    write_task(tmp_path, prompt, target)
    message = refused("eval", "--task", "t.yaml", *SMALL, cwd=tmp_path)
    assert "RCQ-USE-25" in message
    assert said in message


@pytest.mark.parametrize("dry", [(), ("--dry-run",)])
def test_a_later_record_that_is_no_data_is_refused_before_the_first_is_asked(
    tmp_path: Path, dry: tuple[str, ...]
) -> None:
    rows = [*[{"q": f"{i}?", "answer": "1"} for i in range(20)], {"q": "21?", "answer": None}]
    (tmp_path / "d.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    write_task(tmp_path, "{{q}}", "answer")
    assert "d.jsonl, line 41: field 'answer' is null" in refused(
        "eval", "--task", "t.yaml", "--ctx", "512", *dry, cwd=tmp_path
    )


def test_a_later_record_that_does_not_fit_is_refused_before_the_first_is_asked(tmp_path: Path) -> None:
    rows = [{"q": "1 " * size, "answer": "1"} for size in (1, 2, 600, 3)]
    (tmp_path / "d.json").write_text(json.dumps(rows))
    write_task(tmp_path, "{{q}}", "answer", data="d.json")
    said = refused("eval", "--task", "t.yaml", "--ctx", "512", cwd=tmp_path)
    assert "record 3 of d.json needs a context of" in said


def test_a_margin_of_a_task_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(json.dumps({"q": "1?", "answer": "1"}))
    write_task(tmp_path, "{{q}}", "answer", rcq={"margin": 1e-12})
    text = (tmp_path / "t.yaml").read_text()
    (tmp_path / "t.yaml").write_text(text.replace("1e-12", "1.0e-12"))  # YAML wants the point
    said = refused("compare", "dense", "naive", "--task", "t.yaml", *SMALL, "--dry-run", cwd=tmp_path)
    assert "from 1e-09 to below 1" in said


def write_task(folder: Path, prompt: str, target: str, data: str = "d.jsonl", **more: object) -> None:
    task = {
        "task": "t",
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": data},
        "test_split": "test",
        "doc_to_text": prompt,
        "doc_to_target": target,
        "metric_list": [{"metric": "exact_match"}],
    } | more
    (folder / "t.yaml").write_text(json.dumps(task))
