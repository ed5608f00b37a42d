"""`tova` with one set of tokens per layer, from the mean over all heads (the paper's form)."""

from rcq_cli.modes.tova import Tova, TovaSharedLayer

MODE = Tova("tova-layer", TovaSharedLayer, "tova with one set of tokens for all heads of a layer")
