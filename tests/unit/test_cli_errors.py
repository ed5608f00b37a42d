"""What a user meets when something is wrong: exit codes, one line or three, clean streams, one document."""

import errno
import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from rcq_cli import errors, main
from rcq_cli.app import Commands
from rcq_cli.errors import BrokenRun, CertificateViolated, NotComparable, SpecError, UnsupportedHere
from rcq_cli.main import run, with_bare_values
from rcq_cli.shell import Interrupted, Result, Shell, check_target, write_file
from rcq_cli.table import Cell, Column, Table
from tests.unit.stored_runs import stored_run


def call(*argv: str, capsys: pytest.CaptureFixture) -> tuple[int, str, str]:
    code = run(argv)
    out = capsys.readouterr()
    return code, out.out, out.err


@pytest.mark.parametrize(
    ("argv", "came", "allowed"),
    [
        (["profle"], "'profle'", "eval"),
        (["evil"], "'evil'", "did you mean 'eval'?"),
        (["eval", "--modle", "needle"], "--modle", "did you mean '--mod"),
        (["eval", "--samples", "many"], "'many'", "whole number"),
        (["eval", "--samples", "0"], "--samples 0", "1 or more"),
        (["eval", "--seed", "-1"], "--seed -1", "0 or more"),
        (["eval", "--audit", "2"], "--audit '2'", "0 to 1"),
        (["eval", "--audit=much"], "--audit 'much'", "0 to 1"),
        (["eval", "--mode", "certifed"], "'certifed'", "did you mean 'certified'?"),
        (["eval", "--ctx", "12q"], "'12q'", "4k"),
        (["eval", "-o", "tabel"], "'tabel'", "did you mean 'table'?"),
        (["eval", "--json", "-o", "csv"], "--json", "PATH"),
        (["eval", "--model"], "--model", "argument"),
        (["eval", "stray"], "stray", "--help"),
        (["modes", "nive"], "'nive'", "did you mean 'naive'?"),
        (["modes", "--color", "purple"], "'purple'", "auto, always, never"),
        (["--nothing"], "--nothing", "--help"),
    ],
)
def test_a_usage_error_is_one_line_with_what_came_and_what_is_allowed(argv, came, allowed, capsys):
    code, out, err = call(*argv, capsys=capsys)
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert came in err
    assert allowed in err
    assert re.search(r"\[RCQ-[A-Z]+-[0-9]+\]$", err.rstrip())
    assert "Traceback" not in err
    if "--json" not in argv:
        assert out == ""


@pytest.mark.parametrize("flag", ["--resume", "--dry-run", "--samples=3"])
@pytest.mark.parametrize("command", [["eval", "--rescore"], ["compare", "other"], ["trace", "show"]])
def test_what_is_stored_is_neither_resumed_nor_tried(command, flag, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name in ("run", "other"):
        stored_run(tmp_path, "dense", [1.0]).rename(tmp_path / name)
    code, out, err = call(*command, "run", flag, capsys=capsys)
    assert (code, out) == (2, "")
    assert f"{flag.partition('=')[0]} has no meaning" in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "run"]


LONG = "a" * 300


@pytest.mark.parametrize(
    "argv",
    [
        ["compare", "dense", LONG],
        ["report", LONG],
        ["trace", "show", LONG],
        ["eval", "--task", f"{LONG}.yaml"],
        ["compare", "dense", "naive", "--baseline", LONG],
    ],
)
def test_a_name_longer_than_any_file_is_a_usage_error(argv, capsys):
    code, out, err = call(*argv, capsys=capsys)
    assert (code, out, len(err.splitlines())) == (2, "", 1)


def test_rcq_alone_shows_a_short_help_on_stderr(capsys):
    code, out, err = call(capsys=capsys)
    assert (code, out) == (2, "")
    assert "rcq compare dense naive certified" in err
    assert len(err.splitlines()) <= 8


def test_help_goes_to_stdout_and_is_ascii(capsys):
    code, out, err = call("--help", capsys=capsys)
    assert (code, err) == (0, "")
    assert out.isascii()
    assert "eval" in out


def test_a_usage_error_after_parsing_gives_one_document_under_json(capsys):
    code, out, err = call("eval", "--mode", "certifed", "--json", capsys=capsys)
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert document["schema"] == 1
    assert document["status"] == "error"
    assert document["error"]["id"] == "RCQ-USE-01"
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    ("argv", "command"),
    [
        (["eval", "--foo", "--json"], "eval"),
        (["eval", "--json", "--max-errors"], "eval"),
        (["eval", "-o", "json", "--foo"], "eval"),
        (["eval", "--json", "-", "--foo"], "eval"),
        (["trace", "show", "--foo", "--json"], "trace"),
        (["nosuch", "--json"], ""),
        (["--json"], ""),
        (["modes", "--json", "--color", "purple"], "modes"),
    ],
)
def test_a_usage_error_before_parsing_gives_one_document_under_json(argv, command, capsys):
    code, out, err = call(*argv, capsys=capsys)
    document = json.loads(out)
    assert (code, document["exit_code"], document["status"]) == (2, 2, "error")
    assert document["command"] == command
    assert document["error"]["what"] in err
    assert len(err.splitlines()) == 1


@pytest.mark.parametrize(
    "argv",
    [
        ["eval", "--max-errors", "--json"],
        ["eval", "--out", "--json=-"],
        ["eval", "-T", "--json"],
        ["compare", "--out", "-o", "json"],
    ],
)
def test_an_option_that_took_the_next_for_its_value_is_named_in_the_document(
    argv, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    code, out, err = call(*argv, capsys=capsys)
    document = json.loads(out)
    assert code == document["exit_code"] == 2
    assert document["error"]["what"].endswith("follows it")
    assert len(err.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_a_usage_error_before_parsing_writes_its_document_to_the_path(tmp_path, capsys):
    path = tmp_path / "out.json"
    code, out, _ = call("eval", "--foo", "--json", str(path), capsys=capsys)
    assert (code, out) == (2, "")
    assert json.loads(path.read_text("utf-8"))["error"]["what"] == "unknown option --foo"


@pytest.mark.parametrize(
    "argv", [["eval", "--foo"], ["eval", "--foo", "--", "--json"], ["report", "-o", "json", "--foo"]]
)
def test_a_usage_error_before_parsing_leaves_stdout_empty_where_no_document_was_asked_for(argv, capsys):
    code, out, _ = call(*argv, capsys=capsys)
    assert (code, out) == (2, "")


@pytest.mark.parametrize("argv", [["eval", "--foo"], ["trace", "--foo"], ["--json"]])
def test_only_an_option_that_is_near_is_suggested(argv, capsys):
    _, _, err = call(*argv, capsys=capsys)
    assert "did you mean" not in err


def test_an_option_without_its_value_points_to_the_help_of_its_command(capsys):
    _, _, err = call("eval", "--max-errors", capsys=capsys)
    assert "see rcq eval --help" in err


def test_colour_rules_reach_the_messages(capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    _, _, err = call("profle", capsys=capsys)
    assert "\x1b[" in err
    _, _, err = call("profle", "--color", "never", capsys=capsys)
    assert "\x1b[" not in err
    monkeypatch.setenv("NO_COLOR", "1")
    _, _, err = call("profle", capsys=capsys)
    assert "\x1b[" not in err


@pytest.mark.parametrize(
    ("variable", "value"), [("GITHUB_ACTIONS", "true"), ("FORCE_COLOR", "1"), ("TERM", "dumb")]
)
def test_help_has_no_escapes_where_typer_would_colour_it(variable, value):
    done = subprocess.run(
        [sys.executable, "-m", "rcq_cli", "eval", "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, variable: value},
        check=True,
    )
    assert "\x1b[" not in done.stdout


@pytest.mark.parametrize(
    ("argv", "wanted"),
    [
        (["eval", "--json"], ["eval", "--json=-"]),
        (["eval", "--json", "-q"], ["eval", "--json=-", "-q"]),
        (["eval", "--json", "out.json"], ["eval", "--json", "out.json"]),
        (["eval", "--json", "-"], ["eval", "--json", "-"]),
        (["eval", "--audit", "--json"], ["eval", "--audit=1.0", "--json=-"]),
        (["eval", "--audit", "0.1"], ["eval", "--audit", "0.1"]),
        (["eval", "--audit=0.1"], ["eval", "--audit=0.1"]),
        (["eval", "--", "--json"], ["eval", "--", "--json"]),
    ],
)
def test_options_without_their_value_are_written_out(argv, wanted):
    assert with_bare_values(argv) == wanted


def test_presentation_flags_may_stand_anywhere():
    for argv in (
        ["--debug", "modes", "--ascii"],
        ["modes", "--ascii", "--debug"],
        ["--ascii", "--debug", "modes"],
    ):
        shell, rest = Shell.from_argv(argv)
        assert (shell.debug, shell.ascii_only, rest) == (True, True, ["modes"])
    shell, rest = Shell.from_argv(["modes", "--color=never", "--", "--debug"])
    assert (shell.color, shell.debug, rest) == ("never", False, ["modes", "--", "--debug"])


def shell_with_buffers(*argv: str) -> Shell:
    return Shell(argv, stdout=io.StringIO(), stderr=io.StringIO())


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SpecError("w", "y", "f", "RCQ-USE-99"), 2),
        (errors.UnsupportedModel("w", "y", "f"), 2),
        (CertificateViolated("w", "y", "f"), 4),
        (NotComparable("w", "y", "f"), 5),
        (BrokenRun("w", "y", "f"), 6),
        (UnsupportedHere("w", "y", "f"), 7),
        (Interrupted("w", "y", "f"), 130),
    ],
)
def test_each_error_has_its_code_and_its_form(error, code):
    shell = shell_with_buffers()
    assert shell.fail(error) == code
    lines = shell.stderr.getvalue().splitlines()
    if code == 2:
        assert lines == [f"error: w; y; f [{error.id}]"]
    else:
        assert lines == [f"error: w [{error.id}]", "  why: y", "  fix: f"]
    assert shell.stdout.getvalue() == ""


def test_three_lines_stay_three_lines():
    shell = shell_with_buffers()
    shell.fail(BrokenRun("a\nb", "c\n  d", ""))
    assert len(shell.stderr.getvalue().splitlines()) == 3


def test_a_file_that_may_not_be_read_is_no_defect(monkeypatch, capsys):
    def refuse(_shell, _argv):
        raise PermissionError(errno.EACCES, "Permission denied", "secret/x.txt")

    monkeypatch.setattr(main, "_call", refuse)
    code, out, err = call("report", "secret/x.txt", capsys=capsys)
    assert (code, out) == (2, "")
    assert err == "error: no permission for 'secret/x.txt'; allow it, or name another [RCQ-USE-11]\n"


def test_a_defect_saves_its_traceback_and_prints_none(monkeypatch, tmp_path):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    shell = shell_with_buffers("eval", "--json")
    shell.json_target = "-"
    assert shell.internal_error(KeyError("planted")) == 1
    err = shell.stderr.getvalue()
    assert "Traceback" not in err
    saved = Path(re.search(r"traceback is in (\S+)", err).group(1))
    assert saved.parent == tmp_path
    assert "planted" in saved.read_text("utf-8")
    assert json.loads(shell.stdout.getvalue())["exit_code"] == 1


def test_debug_prints_the_traceback():
    shell = shell_with_buffers()
    shell.debug = True
    try:
        raise ValueError("planted")
    except ValueError as error:
        shell.internal_error(error)
    assert "Traceback" in shell.stderr.getvalue()
    assert "planted" in shell.stderr.getvalue()


def test_a_failure_after_the_answer_writes_no_second_document():
    shell = shell_with_buffers()
    shell.parsed("eval", json_target="-")
    shell.answer(Result({"a": 1}, tuple, ()))
    shell.fail(BrokenRun("late"))
    assert json.loads(shell.stdout.getvalue()) == {"a": 1}


def test_json_to_a_path_keeps_the_table_on_stdout(tmp_path):
    shell = shell_with_buffers()
    shell.parsed("eval", json_target=str(tmp_path / "out.json"))
    table = Table("the table", (Column("a"),), ((Cell("1"),),))
    shell.answer(Result({"a": 1}, lambda: (table,), ()))
    assert shell.stdout.getvalue().startswith("the table\n")
    assert json.loads((tmp_path / "out.json").read_text("utf-8")) == {"a": 1}
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_a_failure_writes_its_document_to_the_path_too(tmp_path):
    shell = shell_with_buffers()
    shell.parsed("eval", json_target=str(tmp_path / "out.json"))
    shell.fail(UnsupportedHere("no model", "offline", "pull it"))
    assert json.loads((tmp_path / "out.json").read_text("utf-8"))["exit_code"] == 7
    assert shell.stdout.getvalue() == ""


def test_a_target_that_cannot_be_written_is_refused_before_any_work(tmp_path):
    for bad in (str(tmp_path), str(tmp_path / "none" / "out.json")):
        with pytest.raises(SpecError):
            check_target(bad)
    check_target(str(tmp_path / "out.json"))
    check_target("-")
    check_target(None)
    with pytest.raises(SpecError):
        write_file(tmp_path / "none" / "out.json", "{}")


@pytest.mark.parametrize("blank", ["", " "])
@pytest.mark.parametrize("name", ["eval", "compare", "profile", "trace", "report", "modes", "models"])
def test_an_empty_value_never_means_the_default(name, blank, capsys):
    for param in Commands().get_command(None, name).params:
        option = param.param_type_name == "option"
        if option and param.is_flag:
            continue
        given = (param.opts[0], blank) if option else (blank,)
        code, out, err = call(name, *given, capsys=capsys)
        assert (code, out, len(err.splitlines())) == (2, "", 1), given
        assert repr(blank) in err, given


@pytest.mark.parametrize("command", ["eval", "compare", "profile", "trace"])
@pytest.mark.parametrize("flag", ["--task", "--ctx"])
@pytest.mark.parametrize("value", [",", "4k,", ",niah", "niah,,ppl"])
def test_an_empty_entry_of_a_list_is_refused(command, flag, value, capsys):
    code, out, err = call(command, flag, value, capsys=capsys)
    assert (code, out, len(err.splitlines())) == (2, "", 1)
    assert f"{flag} {value!r}" in err


def test_an_empty_value_gives_one_document_under_json(capsys):
    code, out, _ = call("eval", "--model", "", "--json", capsys=capsys)
    assert (code, json.loads(out)["error"]["what"]) == (2, "--model '' is empty")


FILE_OPTIONS = [
    ("modes", "--json"),
    ("eval", "--json"),
    ("compare", "--json"),
    ("profile", "--json"),
    ("trace", "--json"),
    ("doctor", "--json"),
    ("compare", "--junit"),
    ("compare", "--code-quality"),
    ("compare", "--baseline"),
    ("report", "-o"),
]


@pytest.mark.parametrize("target", ["", " ", ".", "..", "/", "/proc/out.json", "/no/such/folder/out.json"])
@pytest.mark.parametrize(("command", "option"), FILE_OPTIONS)
def test_a_place_that_is_no_file_is_a_usage_error_of_one_line(command, option, target, capsys):
    more = ("--update-baseline",) if option == "--baseline" else ()
    code, out, err = call(command, option, target, *more, capsys=capsys)
    assert (code, out, len(err.splitlines())) == (2, "", 1), err
    assert option in err
    assert repr(target) in err


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    check_target(str(pipe))
    write_file(pipe, "{}")
    assert os.read(reader, 10) == b"{}"
    os.close(reader)
    assert pipe.is_fifo()


def test_the_resume_command_can_be_pasted():
    shell = Shell(("eval", "--fresh", "--model", "my model", "-O", "eps=0.02"))
    assert shell.resume_command() == "rcq eval --model 'my model' -O eps=0.02 --resume"


def test_quiet_drops_notes_but_no_warning():
    shell = shell_with_buffers()
    shell.quiet = True
    shell.say("a note")
    shell.warn("a warning")
    assert shell.stderr.getvalue() == "warning: a warning\n"


def test_the_help_says_what_quiet_leaves(capsys):
    _, out, _ = call("compare", "--help", capsys=capsys)
    assert "warnings and errors stay" in " ".join(out.split())


@pytest.mark.parametrize(
    "argv", [["--help"], ["eval", "--help"], ["modes"], ["modes", "--json"], ["doctor", "--help"]]
)
def test_a_closed_pipe_ends_quietly(argv):
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", "rcq_cli", *argv],
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("encoding", ["utf-8", "cp949", "ascii"])
def test_json_is_one_pure_document_in_every_locale(encoding):
    env = {
        **os.environ,
        "PYTHONIOENCODING": encoding,
        "FORCE_COLOR": "1",
        "TERM": "dumb",
        "PYTHONWARNINGS": "always",
    }
    done = subprocess.run(
        [sys.executable, "-m", "rcq_cli", "modes", "--json"], capture_output=True, env=env, check=True
    )
    assert json.loads(done.stdout.decode("utf-8"))["command"] == "modes"


@pytest.mark.parametrize("encoding", ["cp949", "ascii"])
def test_tables_survive_a_locale_without_box_characters(encoding):
    env = {**os.environ, "PYTHONIOENCODING": encoding}
    done = subprocess.run(
        [sys.executable, "-m", "rcq_cli", "modes"], capture_output=True, env=env, check=True
    )
    shown = done.stdout.decode(encoding)
    assert "certified" in shown
    assert "?" not in shown.splitlines()[1]
