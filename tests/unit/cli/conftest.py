"""Commands as a test runs them: in this process, with stdout and stderr apart."""

from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from kvreshard.cli.app import app

Run = Callable[..., Result]


@pytest.fixture
def run() -> Run:
    """Run a command line; it never ends in a traceback."""

    def run_command(*words: object) -> Result:
        result = CliRunner().invoke(app, [str(word) for word in words])
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return run_command
