"""What does an engine tell another when they first meet, and may the two work together at all?

An `EngineCard` is everything that a peer needs: who the engine is (a restart is another incarnation), what it runs (facts, by
name), its whole layout, and per rank how to reach its memory and its lease table. It is made once, when the engine has
started, and handed to whoever asks.

What a peer says of itself is data to be checked: lists and texts are bounded, each rank of the layout has one rank card, and a
lease table lies in the address space. That its addresses are really registered is checked where they are used: by this side's
transport against what the peer registered, and by NIXL at their owner.

Its key makes its seals (`seal`), and its incarnation is a digest of the key: an engine that does not have the key cannot answer in its
place. Whoever gets the card gets the key.

`check_facts` refuses engines whose caches could mean different things although their shapes agree, and names every fact that
differs with both values. Geometry is not its business: that is proved by the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Annotated, Any

import msgspec

from kvreshard.model import EngineLayout, LayoutMismatch, WireError, packed
from kvreshard.model.form import Form
from kvreshard.model.parts import MAX_RANKS
from kvreshard.model.text import Name, plain
from kvreshard.session import notes
from kvreshard.session.lease import WORD_BYTES
from kvreshard.session.seal import KEY_BYTES, incarnation_of

FORM = "kvreshard.card"
CARD = Form(FORM)
VERSION = CARD.version
MAX_CARD_BYTES = 256 * 1024 * 1024
MAX_RANK_METADATA_BYTES = 64 * 1024 * 1024
MAX_FACTS = 256
MAX_LEASE_SLOTS = 1 << 32
MAILBOX_ENTRY_BYTES = 64


class RankCard(msgspec.Struct, frozen=True, array_like=True):
    """How to reach one rank: its transport's metadata, the address and slots of its lease table, and its mailbox of digests.

    A rank without `mailbox_entries` answers no digest requests.
    """

    rank: int
    metadata: Annotated[bytes, msgspec.Meta(max_length=MAX_RANK_METADATA_BYTES)]
    lease_address: Annotated[int, msgspec.Meta(ge=0)]
    lease_slots: Annotated[int, msgspec.Meta(ge=0, le=MAX_LEASE_SLOTS)]
    mailbox_address: Annotated[int, msgspec.Meta(ge=0)] = 0
    mailbox_entries: Annotated[int, msgspec.Meta(ge=0, le=MAX_LEASE_SLOTS)] = 0


class EngineCard(msgspec.Struct, frozen=True):
    """One engine, complete. `layout` is in the form of `model.packed`.

    `key`: its seals are made with it (`seal`); `incarnation` is a digest of it.

    `reads_notes`: the newest version of notes that its ranks read; a card that does not say reads version 1. `lease_s`: how long its
    leases last after the last heartbeat; who does not say it, as earlier versions, is taken to keep them as long as the reader does.
    """

    form: str
    version: int
    engine: Name
    incarnation: Name
    facts: Annotated[dict[str, str], msgspec.Meta(max_length=MAX_FACTS)]
    layout: bytes
    ranks: Annotated[tuple[RankCard, ...], msgspec.Meta(max_length=MAX_RANKS)]
    key: Annotated[bytes, msgspec.Meta(min_length=KEY_BYTES, max_length=KEY_BYTES)]
    reads_notes: Annotated[int, msgspec.Meta(ge=1)] = 1
    lease_s: Annotated[float, msgspec.Meta(gt=0)] | msgspec.UnsetType = msgspec.UNSET

    def __repr__(self) -> str:
        """Without the key, which must not stand in a log."""
        return f"EngineCard({self.engine!r}, {self.incarnation!r}, {len(self.ranks)} ranks)"

    def decode_layout(self) -> EngineLayout:
        """The layout, checked, with this card's ranks and no other. Raises WireError or LayoutError."""
        layout = packed.decode(self.layout)
        if layout.engine != self.engine:
            raise WireError(f"the card of engine '{self.engine}' carries the layout of engine '{layout.engine}'")
        _check_ranks(layout, self.ranks)
        return layout

    @property
    def rank_by_number(self) -> Mapping[int, RankCard]:
        return {card.rank: card for card in self.ranks}


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(EngineCard)


class _Head(msgspec.Struct):
    form: str
    version: int


_head_decoder = msgspec.msgpack.Decoder(_Head)


def make_card(
    layout: EngineLayout,
    key: bytes,
    facts: Mapping[str, str],
    ranks: Sequence[RankCard],
    lease_s: float | msgspec.UnsetType = msgspec.UNSET,
) -> EngineCard:
    """The card of a whole engine that seals with `key`. Raises WireError unless there is one rank card per rank of the layout."""
    _check_ranks(layout, ranks)
    return EngineCard(
        FORM,
        CARD.version,
        layout.engine,
        incarnation_of(key),
        dict(facts),
        packed.encode(layout),
        tuple(ranks),
        key,
        notes.VERSION,
        lease_s,
    )


def _check_ranks(layout: EngineLayout, ranks: Sequence[RankCard]) -> None:
    described, reachable = {rank.rank for rank in layout.ranks}, {card.rank for card in ranks}
    if described != reachable or len(ranks) != len(reachable):
        raise WireError(
            f"engine '{layout.engine}': ranks {_some(described)} are described and {_some(reachable)} can be reached; "
            "every rank needs both, once"
        )


def _some(numbers: Iterable[int]) -> str:
    return plain(sorted(numbers), 200)


def encode_card(card: EngineCard, version: int | None = None) -> bytes:
    """The bytes of a card, in the newest version unless an earlier one is asked for. Raises WireError if there is none."""
    if version in (None, CARD.version):
        return _encoder.encode(card)
    return _encoder.encode(CARD.lower(msgspec.to_builtins(card, builtin_types=(bytes,)), version))


def decode_card(message: bytes) -> EngineCard:
    """A card from a peer, of this version or an earlier one. Raises WireError for anything else."""
    if len(message) > MAX_CARD_BYTES:
        raise WireError(f"a card of {len(message)} bytes; more than {MAX_CARD_BYTES} are not accepted")
    try:
        head = _head_decoder.decode(message)
        if head.form != FORM:
            raise WireError(
                f"this is '{plain(head.form, 80)}', not a '{FORM}'; is the port that of a kvreshard engine?"
            )
        CARD.check(head.form, head.version)
        if head.version == CARD.version:
            card = _decoder.decode(message)
        else:
            tree = CARD.rise(msgspec.msgpack.decode(message, type=dict[str, Any]))
            card = msgspec.convert(tree, EngineCard)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError) as error:
        raise WireError(f"not a card: {plain(error)}; is the port that of a kvreshard engine?") from error
    if card.incarnation != incarnation_of(card.key):
        raise WireError(
            f"engine '{card.engine}' names incarnation {card.incarnation} and has the key of {incarnation_of(card.key)}; a card has the key "
            "that its incarnation is a digest of. Is this another engine than the one that was asked for?"
        )
    for rank in card.ranks:
        if rank.lease_address + rank.lease_slots * WORD_BYTES > 2**63:
            raise WireError(
                f"engine '{card.engine}', rank {rank.rank}: a lease table of {rank.lease_slots} words at address "
                f"{rank.lease_address} does not end below address 2**63"
            )
        if rank.mailbox_address + rank.mailbox_entries * MAILBOX_ENTRY_BYTES > 2**63:
            raise WireError(
                f"engine '{card.engine}', rank {rank.rank}: a mailbox of {rank.mailbox_entries} entries at address "
                f"{rank.mailbox_address} does not end below address 2**63"
            )
    return card


def check_facts(mine: EngineCard, theirs: EngineCard, allowed: Collection[str] = ()) -> None:
    """Raises LayoutMismatch naming each fact that differs, with both values. A fact that one side lacks is not compared."""
    shared = [name for name in mine.facts if name in theirs.facts and name not in allowed]
    wrong = [name for name in shared if mine.facts[name] != theirs.facts[name]]
    if wrong:
        told = "; ".join(
            f"{name} is '{plain(theirs.facts[name], 200)}' there and '{plain(mine.facts[name], 200)}' here"
            for name in wrong
        )
        raise LayoutMismatch(
            f"engines '{theirs.engine}' and '{mine.engine}' do not run the same: {told}. Make them equal, or list the name "
            f"in 'allow_mismatch' if you know that their caches mean the same"
        )
