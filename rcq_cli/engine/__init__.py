"""Prefill and decode with a transformers model; the only contact with its attention interface."""
