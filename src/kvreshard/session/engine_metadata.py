"""The metadata that engines exchange when they meet, and the check whether two engines may exchange caches.

`EngineMetadata` is all that a peer needs: the engine and its instance id (another one after a restart), what it runs, its layout, and per rank
how to reach its memory, its lease words and its mailbox. It is made once, when the engine has started.

A peer's metadata is data to be checked: lists and texts are bounded, each rank of the layout has one `RankMetadata`, tables lie in the
address space, and the instance id is a digest of the key, so that nobody without the key answers in an engine's place. Whoever gets the
metadata gets the key. That addresses are registered is checked where they are used, by the transport.

`check_compatibility` refuses engines whose caches could mean different things although their shapes agree. The planner checks geometry.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated

import msgspec

from kvreshard.model import EngineLayout, LayoutMismatch, WireError, wire
from kvreshard.model.form import Head
from kvreshard.model.text import Name, plain
from kvreshard.model.wire import MAX_FIELDS, MAX_RANKS
from kvreshard.session.lease import WORD_BYTES
from kvreshard.session.seal import KEY_BYTES, instance_id_of

FORM = "kvreshard.engine_metadata"
VERSION = 1
MAX_ENGINE_METADATA_BYTES = 256 * 1024 * 1024
MAX_RANK_METADATA_BYTES = 64 * 1024 * 1024
MAX_FACTS = 256
MAX_ACCEPTED = 256
MAX_LEASE_SLOTS = 1 << 32
# A day, as `kv_lease_duration`.
MAX_LEASE_S = 86_400.0
MAILBOX_ENTRY_BYTES = 64


class RankMetadata(msgspec.Struct, frozen=True, array_like=True):
    """How to reach one rank. One without `mailbox_entries` answers no digest requests, one without `progress_address` has no progress words."""

    rank: int
    transport_metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_RANK_METADATA_BYTES)]
    lease_address: Annotated[int, msgspec.Meta(ge=0)]
    lease_slots: Annotated[int, msgspec.Meta(ge=0, le=MAX_LEASE_SLOTS)]
    mailbox_address: Annotated[int, msgspec.Meta(ge=0)] = 0
    mailbox_entries: Annotated[int, msgspec.Meta(ge=0, le=MAX_LEASE_SLOTS)] = 0
    progress_address: Annotated[int, msgspec.Meta(ge=0)] = 0


Accepted = Annotated[
    dict[str, Annotated[list[str], msgspec.Meta(max_length=MAX_ACCEPTED)]], msgspec.Meta(max_length=MAX_FACTS)
]

NOT_TOLD = -1
EarlyFields = Annotated[
    dict[Name, Annotated[int, msgspec.Meta(ge=NOT_TOLD, lt=1 << 32)]], msgspec.Meta(max_length=MAX_FIELDS)
]


class EngineMetadata(msgspec.Struct, frozen=True):
    """One engine. `layout` is in the form of `model.wire`; `key` makes its seals; a lease lasts `lease_s` seconds after its last heartbeat.

    `accepts`: by name of a compatibility property, the values at a peer with which this engine exchanges caches beside its own value.
    `early_fields`: what may be read before its prefill has ended, since a token's bytes stay as they are once they are written: field ->
    the place of its layer among those whose end is told (`session.progress`), ascending as they are computed; `NOT_TOLD` where only the end
    of a step is.
    """

    form: str
    version: int
    engine: Name
    instance_id: Name
    compatibility: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_FACTS)]
    layout: bytes
    ranks: Annotated[tuple[RankMetadata, ...], msgspec.Meta(max_length=MAX_RANKS)]
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    lease_s: Annotated[float, msgspec.Meta(gt=0, le=MAX_LEASE_S)]
    accepts: Accepted = {}
    early_fields: EarlyFields = {}

    def __repr__(self) -> str:
        """Without the key, which must not be logged."""
        return f"EngineMetadata({self.engine!r}, {self.instance_id!r}, {len(self.ranks)} ranks)"

    def decode_layout(self) -> EngineLayout:
        """The layout, checked. Raises WireError or LayoutError."""
        layout = wire.decode(self.layout)
        if layout.engine != self.engine:
            raise WireError(
                f"the engine metadata of engine '{self.engine}' carries the layout of engine '{layout.engine}'"
            )
        _check_ranks(layout, self.ranks)
        return layout

    @property
    def rank_by_number(self) -> Mapping[int, RankMetadata]:
        return {metadata.rank: metadata for metadata in self.ranks}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineMetadata)


_head_decoder = msgspec.msgpack.Decoder(Head)


def make_engine_metadata(
    layout: EngineLayout,
    key: bytes,
    compatibility: Mapping[str, str],
    ranks: Sequence[RankMetadata],
    lease_s: float,
    accepts: Mapping[str, Sequence[str]] | None = None,
    early_fields: Mapping[str, int] | None = None,
) -> EngineMetadata:
    """The metadata of an engine that seals with `key`. Raises WireError unless `ranks` are those of the layout."""
    _check_ranks(layout, ranks)
    return EngineMetadata(
        FORM,
        VERSION,
        layout.engine,
        instance_id_of(key),
        dict(compatibility),
        wire.encode(layout),
        tuple(ranks),
        key,
        lease_s,
        {name: list(values) for name, values in (accepts or {}).items()},
        dict(early_fields or {}),
    )


def _check_ranks(layout: EngineLayout, ranks: Sequence[RankMetadata]) -> None:
    described, reachable = {rank.rank for rank in layout.ranks}, {metadata.rank for metadata in ranks}
    if described != reachable or len(ranks) != len(reachable):
        raise WireError(
            f"engine '{layout.engine}': ranks {_some(described)} are described and {_some(reachable)} can be reached; "
            "every rank needs both, once"
        )


def _some(numbers: Iterable[int]) -> str:
    return plain(sorted(numbers), 200)


def encode_engine_metadata(engine_metadata: EngineMetadata) -> bytes:
    """The bytes of engine metadata."""
    return _encoder.encode(engine_metadata)


def decode_engine_metadata(message: bytes) -> EngineMetadata:
    """Engine metadata from a peer. Raises WireError for anything else."""
    if len(message) > MAX_ENGINE_METADATA_BYTES:
        raise WireError(
            f"engine metadata of {len(message)} bytes; more than {MAX_ENGINE_METADATA_BYTES} are not accepted"
        )
    try:
        head = _head_decoder.decode(message)
        head.check(FORM, VERSION)
        engine_metadata = _decoder.decode(message)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not engine metadata: {plain(error)}; is the port that of a kvreshard engine?") from error
    if engine_metadata.instance_id != instance_id_of(engine_metadata.key):
        raise WireError(
            f"engine '{engine_metadata.engine}' names instance id {engine_metadata.instance_id} and has the key of "
            f"{instance_id_of(engine_metadata.key)}; the instance id must be a digest of the key. Is this another engine than the one that "
            "was asked for?"
        )
    for rank in engine_metadata.ranks:
        for what, address, count, entry_bytes in (
            ("lease table", rank.lease_address, rank.lease_slots, WORD_BYTES),
            ("mailbox", rank.mailbox_address, rank.mailbox_entries, MAILBOX_ENTRY_BYTES),
            ("progress table", rank.progress_address, rank.lease_slots, WORD_BYTES),
        ):
            if address >= 2**63 or address + count * entry_bytes > 2**63:
                raise WireError(
                    f"engine '{engine_metadata.engine}', rank {rank.rank}: a {what} of {count} entries at address {address} does not end "
                    "below address 2**63"
                )
    return engine_metadata


def check_compatibility(mine: EngineMetadata, theirs: EngineMetadata, allowed: Collection[str] = ()) -> None:
    """Raises LayoutMismatch naming each property that differs, with both values.

    A property that one side lacks is not compared. Two values that differ are fine where either side accepts the other's.
    """
    shared = [name for name in mine.compatibility if name in theirs.compatibility and name not in allowed]
    wrong = [name for name in shared if not (_accepts(mine, theirs, name) or _accepts(theirs, mine, name))]
    if wrong:
        told = "; ".join(
            f"{name} is '{plain(theirs.compatibility[name], 200)}' there and '{plain(mine.compatibility[name], 200)}' here"
            for name in wrong
        )
        raise LayoutMismatch(
            f"engines '{theirs.engine}' and '{mine.engine}' do not run the same: {told}. Make them equal, or list the name "
            f"in 'allow_mismatch' if you know that their caches mean the same"
        )


def _accepts(one: EngineMetadata, other: EngineMetadata, name: str) -> bool:
    value = other.compatibility[name]
    return value == one.compatibility[name] or value in one.accepts.get(name, ())
