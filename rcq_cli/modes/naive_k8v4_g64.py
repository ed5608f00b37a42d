"""`naive-k8v4` with cheaper value metadata."""

from rcq_cli.modes.naive_k8v4 import NaivePaper

MODE = NaivePaper("naive-k8v4-g64", 64, "naive-k8v4 with 64 channels to a value scale")
