"""`h2o` with the accumulated attention divided by the rows that could see the token."""

from rcq_cli.modes.h2o import H2o, H2oNormLayer

MODE = H2o("h2o-norm", H2oNormLayer, "h2o with the mean instead of the sum of the rows that saw a token")
