"""Error certificates: bounds, rounding slack and the ladder that enforces a budget."""
