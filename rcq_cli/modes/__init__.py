"""How a cache is kept and read: one file = one mode."""
