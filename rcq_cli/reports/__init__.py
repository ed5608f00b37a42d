"""Stored runs in, tables out: one file = one report."""
