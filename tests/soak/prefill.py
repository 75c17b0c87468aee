"""How does a prefill engine of a soak treat a request, as vLLM's scheduler does: pages, a lease, an offer, pages back?"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
from tests.soak.engine import LEASE_SLOTS, Engine
from tests.soak.tables import all_pages, allocate, kept_tokens

from kvreshard.model.tables import PageTable
from kvreshard.session.commands import Acquire, Publish, RemoteEngine, Results, Revoke
from kvreshard.session.lease import Lease
from kvreshard.session.seal import Seal, make_seal


class TableForm(msgspec.Struct, frozen=True):
    """A `PageTable` as a router carries it."""

    pages: list[int]
    num_tokens: int
    first_page: int


class Params(msgspec.Struct, frozen=True):
    """What a router carries from a prefill engine to a decode engine. `transfer`, `details`: of a prefill that is followed; then its
    listener has said all of this.
    """

    remote: RemoteEngine
    lease: Lease
    tables: dict[str, TableForm]
    num_tokens: int
    seed: int
    code: str
    transfer: str = ""
    details: bytes = b""

    @property
    def seal(self) -> Seal:
        """What its source said of lease and tables."""
        return Seal(self.details, bytes.fromhex(self.code))

    @property
    def src_tables(self) -> dict[str, PageTable]:
        return {name: PageTable(form.pages, form.num_tokens, form.first_page) for name, form in self.tables.items()}


def table_forms(tables: Mapping[str, PageTable]) -> dict[str, TableForm]:
    """As a router carries them."""
    return {name: TableForm(table.pages.tolist(), table.num_tokens, table.first_page) for name, table in tables.items()}


def seal_params(engine: Engine, lease: Lease, tables: Mapping[str, PageTable]) -> str:
    """The code of the engine's seal."""
    return make_seal(engine.key, engine.remote.name, lease, tables, b"").code.hex()


@dataclass
class _Prefill:
    tables: Mapping[str, PageTable]
    slot: int
    freed: dict[int, str] = field(default_factory=dict)


class Prefills:
    """The requests of one prefill engine."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._slots = deque(range(LEASE_SLOTS))
        self._live: dict[str, _Prefill] = {}
        self.causes: dict[str, int] = {}

    @property
    def num_pages(self) -> int:
        """Pages of requests that have not ended."""
        return sum(len(all_pages(prefill.tables)) for prefill in self._live.values())

    def __len__(self) -> int:
        return len(self._live)

    def begin(self, request: str, num_tokens: int, seed: int, ttl_s: float, is_revoked: bool = False) -> Params | None:
        """Compute the cache and offer it; None while there are too few pages, or when it is revoked at once."""
        engine = self._engine
        taken = self.take(request, num_tokens)
        if taken is None:
            return None
        tables, lease = taken
        engine.content.write(engine.memory, tables, kept_tokens(engine.layout, num_tokens), seed, num_tokens)
        if is_revoked:
            self.revoke(lease, tables)
            return None
        self.publish(lease, tables, ttl_s)
        code = seal_params(engine, lease, tables)
        return Params(engine.remote, lease, table_forms(tables), num_tokens, seed, code)

    def take(self, request: str, num_tokens: int) -> tuple[dict[str, PageTable], Lease] | None:
        """Pages and a lease; None while there are too few."""
        engine = self._engine
        tables = allocate(engine.layout, engine.pool, num_tokens) if self._slots else None
        if tables is None:
            return None
        lease = Lease(request, self._slots.popleft(), engine.rng.getrandbits(63) | 1)
        engine.submit(Acquire(lease))
        return tables, lease

    def revoke(self, lease: Lease, tables: Mapping[str, PageTable]) -> None:
        """Take the pages of an unpublished request back, and use them for something else at once."""
        self._engine.submit(Revoke(lease))
        self._engine.pool.give(all_pages(tables))
        self._slots.append(lease.slot)

    def publish(self, lease: Lease, tables: Mapping[str, PageTable], ttl_s: float) -> None:
        """Keep the pages until they have been read, or nobody has wanted them for `ttl_s`."""
        self._engine.submit(Publish(lease.request, ttl_s, tables))
        self._live[lease.request] = _Prefill(tables, lease.slot)

    def collect(self, results: Mapping[int, Results]) -> list[str]:
        """Requests whose pages are free again: every rank has said so."""
        ended = []
        for rank, found in results.items():
            for request, cause in found.freed.items():
                self._live[request].freed[rank] = cause
        for request, prefill in list(self._live.items()):
            if len(prefill.freed) == len(self._engine.ranks):
                del self._live[request]
                self._engine.pool.give(all_pages(prefill.tables))
                self._slots.append(prefill.slot)
                cause = "reported" if set(prefill.freed.values()) == {"reported"} else "expired"
                self.causes[cause] = self.causes.get(cause, 0) + 1
                ended.append(request)
        return ended


def decode_params(message: Any) -> Params:
    """From builtins, as they crossed a process border."""
    return msgspec.convert(message, Params)
