"""A route in parts: the same transfers, each for some of its fields.

What a route moves of its fields does not depend on one another, so the parts together move the same bytes as the whole. Only holes (`fill`)
are of the whole route.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import TypeVar

import numpy as np

from kvreshard.plan.pattern import Bases
from kvreshard.plan.route import Route
from kvreshard.plan.transfer import RankTransfer

K = TypeVar("K", bound=Hashable)


def split(route: Route, key: Callable[[RankTransfer, str], K]) -> dict[K, Route]:
    """One route per key, in the order in which they are found; `key` of a transfer and a field of it.

    A transfer whose fields all have one key is the same object in its part.
    """
    found: dict[K, list[RankTransfer]] = {}
    for transfer in route.transfers:
        places: dict[K, list[int]] = {}
        for place, name in enumerate(transfer.fields):
            places.setdefault(key(transfer, name), []).append(place)
        for each, held in places.items():
            found.setdefault(each, []).append(transfer if len(places) == 1 else _of_fields(transfer, held))
    return {each: replace(route, transfers=tuple(transfers)) for each, transfers in found.items()}


def _of_fields(transfer: RankTransfer, places: list[int]) -> RankTransfer:
    bases, held = transfer.bases, np.array(places, dtype=np.int64)
    fields = tuple(transfer.fields[place] for place in places)
    return replace(transfer, fields=fields, bases=Bases(bases.src[held], bases.dst[held], bases.region[held]))
