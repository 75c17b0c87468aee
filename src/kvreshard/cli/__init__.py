"""The commands, and the only room that prints: `verify`, `plan`, `describe`, `models`, `doctor`, `replay`."""

from kvreshard.cli.app import app as _app

__all__ = ["main"]


def main() -> None:
    """The console script."""
    _app()
