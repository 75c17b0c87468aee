"""Explains routes as rows: which rank reads what from which rank, and how many bytes.

Pure data, made from finished routes; whoever shows it adds words and colours.

1. Transfers of equal fields and groups make a `Subject`; one transfer is one `Reading`.
2. Readings that differ in nothing but the destination rank are one, with all these ranks.
3. Subjects of groups that differ in nothing but their names and fields are one, with the bytes of all.
4. Every source rank gets a `SourceUse`: its readers, what leaves it, and who reports to it.

Sizes are per token (a sequence) or per request (a state), exact as fractions: several tokens may share one stored index, and
a rank may hold every n-th token. A group that keeps the last tokens only is counted apart: its bytes do not grow with a prompt.

Refused with UsageError: routes of different engines in one explanation.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from itertools import pairwise
from math import prod

from kvreshard.model.errors import UsageError
from kvreshard.model.expect import expect
from kvreshard.model.ownership import Cyclic, Interval, Ownership
from kvreshard.plan.cost import Choice
from kvreshard.plan.cover import count_common, exact_period
from kvreshard.plan.route import Route
from kvreshard.plan.transfer import RankTransfer, TransferAxis


@dataclass(frozen=True, slots=True)
class Part:
    """What is read along one axis: the coordinates that all of `owned` hold; nothing in `owned` means all of them."""

    axis: str
    extent: int | None
    owned: tuple[Ownership, ...]

    @property
    def is_whole(self) -> bool:
        return not self.owned

    def __str__(self) -> str:
        """`head 2-3 of 8`, `token 0-15 mod 32`, `channel all 64`."""
        if self.extent is None:
            return f"{self.axis} {' and '.join(map(_span, self.owned)) or 'all'}"
        if not self.owned:
            return f"{self.axis} all {self.extent}"
        return f"{self.axis} {' and '.join(_span(owned) for owned in self.owned)} of {self.extent}"


@dataclass(frozen=True, slots=True)
class Reading:
    """What each of `dst_ranks` reads from `src_rank`: one box of every field of the subject, in the way of `choice`."""

    dst_ranks: tuple[int, ...]
    src_rank: int
    parts: tuple[Part, ...]
    num_bytes: Fraction
    choice: Choice


@dataclass(frozen=True, slots=True)
class Subject:
    """Fields that are read alike, of one pair of groups or of several alike.

    Bytes of its readings are those of all its fields, per token or, for a state, per request. A choice is per page, hence for
    the fields of one pair of groups.
    """

    fields: tuple[str, ...]
    src_groups: tuple[str, ...]
    dst_groups: tuple[str, ...]
    src_tokens_per_page: int | None
    dst_tokens_per_page: int | None
    window_tokens: int | None
    is_state: bool
    readings: tuple[Reading, ...]


@dataclass(frozen=True, slots=True)
class SourceUse:
    """One source rank: `readers` read from it, `reporters` tell it when they are done (without readers: an appointed one).

    `window_bytes`: by number of the last tokens that are kept, what is read of each of these; the others count in `bytes_per_token`.
    """

    src_rank: int
    readers: tuple[int, ...]
    reporters: tuple[int, ...]
    bytes_per_token: Fraction
    window_bytes: tuple[tuple[int, Fraction], ...]
    state_bytes: Fraction


@dataclass(frozen=True, slots=True)
class Explanation:
    """A pair of engines, explained. Totals count what the destination ranks of the given routes read together."""

    src_engine: str
    dst_engine: str
    dst_ranks: tuple[int, ...]
    subjects: tuple[Subject, ...]
    sources: tuple[SourceUse, ...]
    warnings: tuple[str, ...]

    @property
    def unread(self) -> tuple[SourceUse, ...]:
        """Source ranks that nobody reads, as far as the given routes can tell: their appointed reporter is among them."""
        return tuple(u for u in self.sources if not u.readers and set(u.reporters) <= set(self.dst_ranks))

    @property
    def bytes_per_token(self) -> Fraction:
        return sum((use.bytes_per_token for use in self.sources), Fraction(0))

    @property
    def window_bytes(self) -> dict[int, Fraction]:
        """Bytes per token of the last so many tokens, by that number, which is all that a window keeps."""
        found: dict[int, Fraction] = {}
        for use in self.sources:
            for tokens, num_bytes in use.window_bytes:
                found[tokens] = found.get(tokens, Fraction(0)) + num_bytes
        return dict(sorted(found.items()))

    @property
    def state_bytes(self) -> Fraction:
        return sum((use.state_bytes for use in self.sources), Fraction(0))


def explain(routes: Sequence[Route]) -> Explanation:
    """The routes of some or all destination ranks of one pair of engines. Raises UsageError for anything else."""
    expect(routes, Sequence, "routes", "what `kvreshard.compile_routes` returns")
    for route in routes:
        expect(route, Route, "a route", "what `kvreshard.compile_routes` returns for one rank")
    if len({(route.src_engine, route.dst_engine) for route in routes}) != 1:
        raise UsageError("explain takes routes of one pair of engines, and at least one")
    subjects: dict[object, tuple[RankTransfer, list[Reading]]] = {}
    for route in routes:
        for transfer in route.transfers:
            key = (transfer.fields, transfer.src_group, transfer.dst_group)
            subjects.setdefault(key, (transfer, []))[1].append(_reading(transfer))
    return Explanation(
        src_engine=routes[0].src_engine,
        dst_engine=routes[0].dst_engine,
        dst_ranks=tuple(route.dst_rank for route in routes),
        subjects=_merge([_subject(transfer, readings) for transfer, readings in subjects.values()]),
        sources=_sources(routes),
        warnings=tuple(dict.fromkeys(warning for route in routes for warning in route.warnings)),
    )


def _subject(transfer: RankTransfer, readings: list[Reading]) -> Subject:
    return Subject(
        fields=transfer.fields,
        src_groups=(transfer.src_group.name,),
        dst_groups=(transfer.dst_group.name,),
        src_tokens_per_page=transfer.src_group.tokens_per_page,
        dst_tokens_per_page=transfer.dst_group.tokens_per_page,
        window_tokens=_window(transfer),
        is_state=transfer.is_state,
        readings=_collapse(readings),
    )


def _window(transfer: RankTransfer) -> int | None:
    """Tokens that one side keeps at least, where a side does not keep all: no other is moved."""
    windows = [group.window_tokens for group in (transfer.src_group, transfer.dst_group)]
    return min((tokens for tokens in windows if tokens is not None), default=None)


def _merge(subjects: Iterable[Subject]) -> tuple[Subject, ...]:
    """One subject for all that differ in groups and fields only, and have as many fields."""
    together: dict[object, list[Subject]] = {}
    for subject in subjects:
        key = (replace(subject, fields=(), src_groups=(), dst_groups=()), len(subject.fields))
        together.setdefault(key, []).append(subject)
    return tuple(
        replace(
            alike[0],
            fields=tuple(name for subject in alike for name in subject.fields),
            src_groups=tuple(dict.fromkeys(name for subject in alike for name in subject.src_groups)),
            dst_groups=tuple(dict.fromkeys(name for subject in alike for name in subject.dst_groups)),
            readings=tuple(replace(r, num_bytes=r.num_bytes * len(alike)) for r in alike[0].readings),
        )
        for alike in together.values()
    )


def _collapse(readings: Iterable[Reading]) -> tuple[Reading, ...]:
    """One reading for all that differ in the destination rank only, ordered by first destination rank and source rank."""
    together: dict[Reading, list[int]] = {}
    for reading in readings:
        together.setdefault(replace(reading, dst_ranks=()), []).extend(reading.dst_ranks)
    merged = [replace(reading, dst_ranks=tuple(sorted(ranks))) for reading, ranks in together.items()]
    return tuple(sorted(merged, key=lambda reading: (reading.dst_ranks, reading.src_rank)))


def _reading(transfer: RankTransfer) -> Reading:
    parts = tuple(_part(axis) for axis in transfer.axes)
    return Reading((transfer.dst_rank,), transfer.src_rank, parts, transfer_bytes(transfer), transfer.choice)


def transfer_bytes(transfer: RankTransfer) -> Fraction:
    """What a transfer moves per token, on average over a period of its ownerships; per request if it is a state."""
    cells = prod((_share(axis) for axis in transfer.axes), start=Fraction(1))
    return cells * transfer.element_bytes * len(transfer.fields) / transfer.tokens_per_index


def _share(axis: TransferAxis) -> Fraction:
    """Coordinates of a bounded axis, or the share of all coordinates of the sequence."""
    owners = (axis.chosen, axis.dst.owned)
    count = count_common(axis.extent, *owners)
    return Fraction(count, 1 if axis.extent is not None else exact_period(None, owners))


def _part(axis: TransferAxis) -> Part:
    chosen, held = axis.chosen, axis.dst.owned
    if (
        isinstance(chosen, Interval)
        and isinstance(held, Interval)
        and chosen.stop is not None
        and held.stop is not None
    ):
        both = Interval(max(chosen.start, held.start), min(chosen.stop, held.stop))
        return Part(axis.name, axis.extent, () if both == Interval(0, axis.extent) else (both,))
    return Part(
        axis.name, axis.extent, tuple(o for o in dict.fromkeys((chosen, held)) if o != Interval(0, axis.extent))
    )


def _span(owned: Ownership) -> str:
    """First and last coordinate: people count heads, not half-open ends."""
    if isinstance(owned, Interval) and owned.stop is None:
        return f"{owned.start}-"
    last = owned.start + owned.run - 1 if isinstance(owned, Cyclic) else (owned.stop or 0) - 1
    span = str(owned.start) if last == owned.start else f"{owned.start}-{last}"
    return f"{span} mod {owned.step}" if isinstance(owned, Cyclic) else span


def _sources(routes: Sequence[Route]) -> tuple[SourceUse, ...]:
    reporters: dict[int, set[int]] = {}
    readers: dict[int, set[int]] = {}
    # Per source rank, by the tokens that a window keeps; None: all of them.
    per_token: dict[int, dict[int | None, Fraction]] = {}
    per_request: dict[int, Fraction] = {}
    for route in routes:
        for src_rank, ranks in route.reporters.items():
            reporters.setdefault(src_rank, set()).update(ranks)
        for transfer in route.transfers:
            src_rank = transfer.src_rank
            readers.setdefault(src_rank, set()).add(transfer.dst_rank)
            if transfer.is_state:
                per_request[src_rank] = per_request.get(src_rank, Fraction(0)) + transfer_bytes(transfer)
                continue
            sizes, window = per_token.setdefault(src_rank, {}), _window(transfer)
            sizes[window] = sizes.get(window, Fraction(0)) + transfer_bytes(transfer)
    return tuple(_use(rank, readers, reporters, per_token.get(rank, {}), per_request) for rank in sorted(reporters))


def _use(
    rank: int,
    readers: Mapping[int, set[int]],
    reporters: Mapping[int, set[int]],
    per_token: Mapping[int | None, Fraction],
    per_request: Mapping[int, Fraction],
) -> SourceUse:
    return SourceUse(
        rank,
        tuple(sorted(readers.get(rank, ()))),
        tuple(sorted(reporters[rank])),
        per_token.get(None, Fraction(0)),
        tuple(sorted((tokens, size) for tokens, size in per_token.items() if tokens is not None)),
        per_request.get(rank, Fraction(0)),
    )


def number_ranges(numbers: Iterable[int]) -> str:
    """Numbers as a person writes them: `0-4,6,8-9`; three and more at one distance are `1-27 step 2`.

    >>> number_ranges([0, 1, 2, 3, 7])
    '0-3,7'
    >>> number_ranges([1, 3, 5, 7])
    '1-7 step 2'
    """
    ordered = sorted(set(numbers))
    steps = {after - before for before, after in pairwise(ordered)}
    if len(ordered) > 2 and len(steps) == 1 and steps != {1}:
        return f"{ordered[0]}-{ordered[-1]} step {steps.pop()}"
    ranges: list[list[int]] = []
    for number in ordered:
        if ranges and ranges[-1][-1] + 1 == number:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ",".join("-".join(map(str, ends)) for ends in ranges)


def name_fields(names: Iterable[str]) -> str:
    """`field_patterns` in one line. Raises UsageError."""
    expect(names, Iterable, "the names of fields", "['layers.0.attn.k', ...]")
    if isinstance(names, str):
        raise UsageError(f"the names of fields are the text {names!r:.80}; give a list of names")
    names = list(names)
    for name in names:
        expect(name, str, "the name of a field", "as in 'layers.0.attn.k'")
    return " ".join(field_patterns(names))


def field_patterns(names: Iterable[str]) -> list[str]:
    """Field names with their first number collected: `layers.{0-4,6}.attn.{k,v}`.

    >>> field_patterns(["layers.0.k", "layers.0.v", "layers.1.k", "layers.1.v"])
    ['layers.{0-1}.{k,v}']
    >>> field_patterns(["draft", "layers.7.latent"])
    ['draft', 'layers.7.latent']
    """
    numbers: dict[tuple[str, str], list[int]] = {}
    for name in names:
        words = name.split(".")
        at = next((index for index, word in enumerate(words) if word.isdecimal()), None)
        if at is None:
            numbers[name, ""] = []
        else:
            numbers.setdefault((".".join(words[:at]), ".".join(words[at + 1 :])), []).append(int(words[at]))
    endings: dict[tuple[str, tuple[int, ...]], list[str]] = {}
    for (start, ending), found in numbers.items():
        endings.setdefault((start, tuple(found)), []).append(ending)
    return [_one_name(start, found, after) for (start, found), after in endings.items()]


def _one_name(start: str, numbers: tuple[int, ...], endings: list[str]) -> str:
    if not numbers:
        return start
    middle = str(numbers[0]) if len(numbers) == 1 else f"{{{number_ranges(numbers)}}}"
    shared = _shared_words(endings)
    rest = [ending[len(shared) :] for ending in endings]
    tail = rest[0] if len(rest) == 1 else f"{{{','.join(rest)}}}"
    return ".".join(filter(None, [start, middle, shared + tail]))


def _shared_words(endings: list[str]) -> str:
    """The whole words, with their last dot, that several endings begin with."""
    if len(endings) == 1:
        return ""
    columns = zip(*(ending.split(".")[:-1] for ending in endings), strict=False)
    shared = ""
    for words in columns:
        if len(set(words)) > 1:
            break
        shared += f"{words[0]}."
    return shared
