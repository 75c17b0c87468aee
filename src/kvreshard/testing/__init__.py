"""Shipped for tests: the slow oracle, the contract that each transport must pass, the ranks behind `kvreshard verify`."""
