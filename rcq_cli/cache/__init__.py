"""The tiered store: compressed blocks, originals, open tail."""
