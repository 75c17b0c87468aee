"""The commands, and the only room that prints: see `app`."""

from kvreshard.cli.app import app as _app

__all__ = ["main"]


def main() -> None:
    """The console script."""
    _app()
