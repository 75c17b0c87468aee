"""Two engines of several ranks in one process, which tests of an endpoint share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from tests.unit.session.world import World, make_world


@pytest.fixture(params=[(1, 2), (4, 2), (2, 3)], ids=lambda sizes: f"{sizes[0]}->{sizes[1]}")
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    """Source ranks -> destination ranks; a test file may have a world of its own."""
    made = make_world(*request.param)
    yield made
    made.close()
