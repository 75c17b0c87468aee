"""Watches loads, off by default: digests in logical coordinates, flight records and their replay, shadow mode."""
