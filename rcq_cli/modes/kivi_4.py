"""`kivi` with 4 bits."""

from rcq_cli.modes.kivi import Kivi

MODE = Kivi("kivi-4", 4)
