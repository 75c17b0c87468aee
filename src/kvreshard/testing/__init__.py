"""Shipped for tests: the slow oracle, random engine pairs, the contract that each transport must pass."""
