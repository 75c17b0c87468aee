"""Moves bytes from one rank's memory into another's. `base` defines the interface; `nixl` and `memory` implement it."""
