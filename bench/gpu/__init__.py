"""Proves and measures everything on one GPU: see README.md."""
