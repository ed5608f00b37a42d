"""Stored runs as one HTML file that opens offline."""
