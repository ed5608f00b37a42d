"""The instrument model at the step where the papers' own INT8/INT4 format begins to lose needles."""

from rcq_cli.models._needle_weights import Knobs
from rcq_cli.models.needle import NeedleSource

SOURCE = NeedleSource(
    name="needle-hard",
    preset=Knobs(key_margin=0.0015, value_margin=0.04, outliers=4),
    summary="constructed instrument model, harder: an unchecked INT8/INT4 cache loses some needles",
)
