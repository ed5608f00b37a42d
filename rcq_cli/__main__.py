"""The entry function of `rcq`; it answers `--version` before anything slow is imported."""

import sys


def main() -> None:
    """Run the command line and leave with its exit code."""
    if sys.argv[1:] == ["--version"]:
        from rcq_cli import __version__

        sys.stdout.write(f"rcq {__version__}\n")
        return
    from rcq_cli.main import run

    sys.exit(run(sys.argv[1:]))


if __name__ == "__main__":
    main()
