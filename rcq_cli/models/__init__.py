"""Where weights come from: one file = one source."""
