"""What does an engine tell another when they first meet, and may the two work together at all?

An `EngineCard` is everything that a peer needs: who the engine is (a restart is another incarnation), what it runs (facts, by
name), its whole layout, and per rank how to reach its memory and its lease table. It is made once, when the engine has
started, and handed to whoever asks.

`check_facts` refuses engines whose caches could mean different things although their shapes agree, and names every fact that
differs with both values. Geometry is not its business: that is proved by the planner.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import msgspec

from kvreshard.model import EngineLayout, LayoutMismatch, WireError, wire

FORM = "kvreshard.card"
VERSION = 1
MAX_CARD_BYTES = 256 * 1024 * 1024


class RankCard(msgspec.Struct, frozen=True, array_like=True):
    """How to reach one rank: its transport's metadata, the address and slots of its lease table, and its board of answers.

    A rank without `board_entries`, as earlier versions announce themselves, answers no questions.
    """

    rank: int
    metadata: bytes
    lease_address: int
    lease_slots: int
    board_address: int = 0
    board_entries: int = 0


class EngineCard(msgspec.Struct, frozen=True):
    """One engine, complete. `layout` is in the wire form of `model.wire`."""

    form: str
    version: int
    engine: str
    incarnation: str
    facts: dict[str, str]
    layout: bytes
    ranks: tuple[RankCard, ...]

    def decode_layout(self) -> EngineLayout:
        """The layout, checked. Raises WireError or LayoutError."""
        return wire.decode(self.layout)

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
    layout: EngineLayout, incarnation: str, facts: Mapping[str, str], ranks: Sequence[RankCard]
) -> EngineCard:
    """The card of a whole engine. Raises WireError unless there is one rank card per rank of the layout."""
    described, reachable = {rank.rank for rank in layout.ranks}, {card.rank for card in ranks}
    if described != reachable or len(ranks) != len(reachable):
        raise WireError(
            f"engine '{layout.engine}': ranks {sorted(described)} are described and {sorted(reachable)} can be reached; "
            "every rank needs both"
        )
    return EngineCard(FORM, VERSION, layout.engine, incarnation, dict(facts), wire.encode(layout), tuple(ranks))


def encode_card(card: EngineCard) -> bytes:
    """The bytes of a card."""
    return _encoder.encode(card)


def decode_card(message: bytes) -> EngineCard:
    """A card from a peer. Raises WireError for anything else, a later version included."""
    if len(message) > MAX_CARD_BYTES:
        raise WireError(f"a card of {len(message)} bytes; more than {MAX_CARD_BYTES} are not accepted")
    try:
        head = _head_decoder.decode(message)
        if head.form != FORM:
            raise WireError(f"this is '{head.form[:80]}', not a '{FORM}'; is the port that of a kvreshard engine?")
        if not 1 <= head.version <= VERSION:
            raise WireError(
                f"card of version {head.version}; this side reads versions 1 to {VERSION}: upgrade the older side"
            )
        return _decoder.decode(message)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError) as error:
        raise WireError(f"not a card: {error}; is the port that of a kvreshard engine?") from error


def check_facts(mine: EngineCard, theirs: EngineCard, allowed: Collection[str] = ()) -> None:
    """Raises LayoutMismatch naming each fact that differs, with both values. A fact that one side lacks is not compared."""
    shared = [name for name in mine.facts if name in theirs.facts and name not in allowed]
    wrong = [name for name in shared if mine.facts[name] != theirs.facts[name]]
    if wrong:
        told = "; ".join(
            f"{name} is '{theirs.facts[name][:200]}' there and '{mine.facts[name][:200]}' here" for name in wrong
        )
        raise LayoutMismatch(
            f"engines '{theirs.engine}' and '{mine.engine}' do not run the same: {told}. Make them equal, or list the name "
            f"in 'allow_mismatch' if you know that their caches mean the same"
        )
