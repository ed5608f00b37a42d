"""The entry function of `rcq`; it answers `--version` before anything slow is imported."""

import sys

from rcq_cli.streams import guard


def main() -> None:
    """Run the command line and leave with its exit code."""
    guard()
    if sys.argv[1:] == ["--version"]:
        from rcq_cli.shell import version

        sys.exit(version())
    from rcq_cli.main import run
    from rcq_cli.shell import Interrupted

    code = run(sys.argv[1:])
    if code == Interrupted.exit_code:
        ignore_signals()
    sys.exit(code)


def ignore_signals() -> None:
    """Let no further signal change how a stopped command ends: Python restores what kills when it leaves."""
    import signal

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
