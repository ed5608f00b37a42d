"""Where cells run: one file = one executor."""
