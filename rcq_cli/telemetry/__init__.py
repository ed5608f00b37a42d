"""Readings of this machine; a missing value carries its reason."""
