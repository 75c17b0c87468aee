"""The views of a plan: tables for a person, a document for a program.

The tables show what moves, then what one request costs per pair of ranks, then one block per pair of groups. With details there is one table
per set of fields that are read alike, with runs and reasons, and one of the source ranks. Bytes in the tables are rounded; the document has
exact numbers, and fields as patterns (`layers.{0-4,6}.attn.{k,v}`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict, astuple, dataclass, replace
from fractions import Fraction
from typing import Any

from rich.console import Console
from rich.table import Column

from kvreshard.cli.inputs import Pair
from kvreshard.cli.output import bytes_text, join_ranks, number, number_column, seconds_text, show_line, show_table
from kvreshard.cli.totals import PairTotal
from kvreshard.model.ownership import Cyclic, Ownership
from kvreshard.model.text import counted
from kvreshard.plan.cost import Choice
from kvreshard.plan.explain import Explanation, Reading, SourceUse, Subject, field_patterns, name_fields

# Ranges of a list of layers in a title; all of them with details.
MOST_RANGES = 4
RANKS = (Column("decode rank"), Column("reads from"))


@dataclass(frozen=True, slots=True)
class RequestCost:
    """The cost of a request. `what`: the request in words."""

    what: str
    totals: tuple[PairTotal, ...]

    @property
    def seconds_of(self) -> dict[int, float]:
        """Decode rank -> its predicted seconds."""
        seconds: dict[int, float] = {}
        for total in self.totals:
            seconds[total.dst_rank] = seconds.get(total.dst_rank, 0.0) + total.seconds
        return seconds

    @property
    def slowest_s(self) -> float:
        """Predicted seconds of the decode rank that takes longest."""
        return max(self.seconds_of.values(), default=0.0)


def show_plan(
    console: Console, explanation: Explanation, pair: Pair, priced: RequestCost | None, details: bool, note: str = ""
) -> None:
    """Everything, totals first. `note`: what else there is to say of the request."""
    show_line(console, pair.title, "bold")
    show_line(console, moved_text(explanation))
    for told in pair.notes:
        show_line(console, f"note: {told}")
    show_line(console, "")
    if priced is not None:
        _show_totals(
            console,
            priced,
            {reading.choice.way for subject in explanation.subjects for reading in subject.readings},
            note,
        )
    blocks: dict[object, list[Subject]] = {}
    for subject in explanation.subjects:
        blocks.setdefault((subject.src_groups, subject.dst_groups), []).append(subject)
    for block in blocks.values():
        for part in [[subject] for subject in block] if details else [block]:
            _show_block(console, part, details)
    if details:
        _show_sources(console, explanation)
    for line in closing_lines(explanation):
        show_line(console, line)
    if not details:
        show_line(
            console, "every field, run and reason: --details; the bytes of a request: --copies --tokens N --explain"
        )


def moved_text(explanation: Explanation) -> str:
    """What a request moves, in a line."""
    parts = []
    if explanation.bytes_per_token:
        parts.append(f"{bytes_text(explanation.bytes_per_token)} per token")
    for tokens, size in explanation.window_bytes.items():
        parts.append(f"{bytes_text(size)} per token of the last {tokens:,}")
    if explanation.state_bytes:
        parts.append(f"{bytes_text(explanation.state_bytes)} of states per request")
    together = " together" if len(explanation.dst_ranks) > 1 else ""
    whom = f"{counted(len(explanation.dst_ranks), 'decode rank')}{together}"
    what = " and ".join(filter(None, (", ".join(parts[:-1]), *parts[-1:]))) or "nothing"
    return f"moved: {what}, to {whom}"


def _show_totals(console: Console, priced: RequestCost, ways: set[str], note: str) -> None:
    """`ways`: of pages alone. A request's may differ, where many of its pages are read together."""
    together: dict[object, list[PairTotal]] = {}
    for total in priced.totals:
        together.setdefault(astuple(replace(total, dst_rank=0)), []).append(total)
    rows = [
        (
            join_ranks([total.dst_rank for total in alike]), str(alike[0].src_rank), bytes_text(alike[0].num_bytes),
            bytes_text(alike[0].num_staged_bytes), f"{alike[0].num_operations:,}", seconds_text(alike[0].seconds),
        )
        for alike in together.values()
    ]  # fmt: skip
    names = ("bytes", "staged", "operations", "predicted")
    num_bytes = sum(total.num_bytes for total in priced.totals)
    num_operations = sum(total.num_operations for total in priced.totals)
    all_text = (
        f"all: {bytes_text(num_bytes)} in {counted(num_operations, 'operation')}; predicted {seconds_text(priced.slowest_s)}, the slowest "
        "decode rank by itself"
    )
    notes = [all_text]
    num_staged = sum(total.num_staged_bytes for total in priced.totals)
    if (num_staged > 0 and "staged" not in ways) or (num_staged < num_bytes and "direct" not in ways):
        notes.append("note: neighbouring pages are read together here, another way than a page alone would be")
    if note:
        notes.append(note)
    show_table(
        console, f"{priced.what}, what each decode rank reads", (*RANKS, *map(number_column, names)), rows, notes
    )


def _show_block(console: Console, block: list[Subject], details: bool) -> None:
    """Fields of one pair of groups, summed per pair of ranks; with details each reading, with its runs and the reason for its way."""
    parts: dict[tuple[int, int, int], list[tuple[str, Fraction, str, str]]] = {}
    for subject in block:
        for index, reading in enumerate(subject.readings):
            run_text = f"{reading.choice.num_runs:,} x {bytes_text(reading.choice.run_bytes)}"
            for dst_rank in reading.dst_ranks:
                part = parts_text(reading), reading.num_bytes, run_text, reading.choice.way
                parts.setdefault((dst_rank, reading.src_rank, index if details else 0), []).append(part)
    rows: dict[tuple[str, ...], list[int]] = {}
    for dst_rank, src_rank, index in sorted(parts):
        what, sizes, runs, ways = zip(*parts[dst_rank, src_rank, index], strict=True)
        size = bytes_text(sum(sizes, Fraction(0)))
        cells = (
            str(src_rank),
            "; ".join(dict.fromkeys(what)),
            size,
            *(runs if details else ()),
            ", ".join(dict.fromkeys(ways)),
        )
        rows.setdefault(cells, []).append(dst_rank)
    show_line(console, _groups_text(block[0]), "bold")
    fields = name_fields(name for subject in block for name in subject.fields)
    unit, runs_per = ("per request", "runs per state") if block[0].is_state else ("per token", "runs per page")
    numbers = map(number_column, (unit, runs_per) if details else (unit,))
    show_table(
        console,
        fields if details else shorten(fields),
        (*RANKS, Column("what"), *numbers, Column("a page alone")),
        ((join_ranks(ranks), *cells) for cells, ranks in rows.items()),
        _reasons(block[0]) if details else (),
    )


def shorten(fields: str) -> str:
    """Patterns with the first ranges of a long list of numbers, and the last.

    >>> shorten("layers.{0-2,4-6,8-10,12-14,16-18,20-22}.attn.{k,v}")
    'layers.{0-2,4-6,8-10,...,20-22}.attn.{k,v}'
    """

    def cut(found: re.Match[str]) -> str:
        ranges = found[1].split(",")
        few = [*ranges[: MOST_RANGES - 1], "...", ranges[-1]]
        return "{" + ",".join(ranges if len(ranges) <= MOST_RANGES else few) + "}"

    return re.sub(r"\{([\d,-]+)\}", cut, fields)


def _reasons(subject: Subject) -> Iterator[str]:
    """Why fields are read directly or staged, once per distinct choice."""
    ranks: dict[Choice, list[int]] = {}
    for reading in subject.readings:
        ranks.setdefault(reading.choice, []).extend(reading.dst_ranks)
    unit = "state" if subject.is_state else "page"
    for choice, found in ranks.items():
        who = f" (decode rank {join_ranks(found)})" if len(ranks) > 1 else ""
        yield f"{choice.way}: {why_text(choice, unit)}{who}"


def why_text(choice: Choice, unit: str) -> str:
    """Why a page is read this way, in predicted times."""
    direct = f"{counted(choice.num_runs, 'run')} one by one {seconds_text(choice.direct_s)}"
    reads = f"{counted(choice.num_reads, 'read')} and a permutation {seconds_text(choice.staged_s)}"
    taken, other = (direct, reads) if choice.way == "direct" else (reads, direct)
    return f"{'forced; ' if choice.forced else ''}{taken} per {unit}, {other}"


def _groups_text(subject: Subject) -> str:
    src, dst = name_fields(subject.src_groups), name_fields(subject.dst_groups)
    groups = f"group {src}" if src == dst else f"group {src} -> {dst}"
    if subject.window_tokens is not None:
        groups += f", the last {subject.window_tokens:,} tokens"
    if subject.is_state:
        return f"{groups}, one page per request"
    sizes = dict.fromkeys((subject.src_tokens_per_page or 0, subject.dst_tokens_per_page or 0))
    plural = "" if list(sizes) == [1] else "s"
    return f"{groups}, pages of {' -> '.join(f'{size:,}' for size in sizes)} token{plural}"


def parts_text(reading: Reading) -> str:
    """The part of each field that is read: `head 2-3 of 8`."""
    return ", ".join(str(part) for part in reading.parts if not part.is_whole) or "all"


def _show_sources(console: Console, explanation: Explanation) -> None:
    """What is read from each source rank, and who reports to it when its pages are free."""
    has_states = bool(explanation.state_bytes)
    sizes = [number_column(name) for name in (("per token", "per request") if has_states else ("per token",))]
    rows = []
    for use in explanation.sources:
        cells = [str(use.src_rank), join_ranks(use.readers), join_ranks(use.reporters), _per_token(use)]
        rows.append((*cells, *((bytes_text(use.state_bytes),) if has_states else ())))
    columns = (Column("prefill rank"), Column("read by decode ranks"), Column("reported to by"), *sizes)
    show_table(console, "prefill ranks", columns, rows)


def _per_token(use: SourceUse) -> str:
    """Bytes of a token, and those in windows that still hold it."""
    windows = sum((size for _, size in use.window_bytes), Fraction(0))
    sizes = [bytes_text(use.bytes_per_token)] if use.bytes_per_token or not windows else []
    return " + ".join([*sizes, *([f"{bytes_text(windows)} in windows"] if windows else [])])


def closing_lines(explanation: Explanation) -> Iterator[str]:
    """Unread sources and warnings."""
    unread: dict[tuple[int, ...], list[int]] = {}
    for use in explanation.unread:
        unread.setdefault(use.reporters, []).append(use.src_rank)
    for reporters, ranks in unread.items():
        who, verb = ("ranks", "are") if len(ranks) > 1 else ("rank", "is")
        yield (
            f"prefill {who} {join_ranks(ranks)} {verb} read by no decode rank; decode rank {join_ranks(reporters)} reports when pages are free"
        )
    yield from (f"warning: {warning}" for warning in explanation.warnings)


def plan_document(explanation: Explanation, pair: Pair, priced: RequestCost | None) -> dict[str, Any]:
    """The same for a program."""
    return {
        "prefill_engine": explanation.src_engine,
        "decode_engine": explanation.dst_engine,
        "decode_ranks": list(explanation.dst_ranks),
        "request": None
        if priced is None
        else {
            "what": priced.what,
            "predicted_seconds": priced.slowest_s,
            "pairs": [asdict(total) for total in priced.totals],
        },
        "subjects": [_subject_document(subject) for subject in explanation.subjects],
        "prefill_ranks": [_source_document(use) for use in explanation.sources],
        "bytes_per_token": number(explanation.bytes_per_token),
        "window_bytes_per_token": {str(tokens): number(size) for tokens, size in explanation.window_bytes.items()},
        "state_bytes_per_request": number(explanation.state_bytes),
        "notes": list(pair.notes),
        "warnings": [*pair.warnings, *explanation.warnings],
    }


def _subject_document(subject: Subject) -> dict[str, Any]:
    return {
        "fields": field_patterns(subject.fields),
        "num_fields": len(subject.fields),
        "prefill_groups": list(subject.src_groups),
        "decode_groups": list(subject.dst_groups),
        "prefill_tokens_per_page": subject.src_tokens_per_page,
        "decode_tokens_per_page": subject.dst_tokens_per_page,
        "window_tokens": subject.window_tokens,
        "is_state": subject.is_state,
        "readings": [
            {
                "dst_ranks": list(reading.dst_ranks),
                "src_rank": reading.src_rank,
                "parts": {part.axis: [_owned_document(owned) for owned in part.owned] for part in reading.parts},
                "bytes_per_request" if subject.is_state else "bytes_per_token": number(reading.num_bytes),
                "way": reading.choice.way,
                "forced": reading.choice.forced,
                "runs_per_page": reading.choice.num_runs,
                "run_bytes": reading.choice.run_bytes,
                "reads_per_page_if_staged": reading.choice.num_reads,
                "direct_seconds_per_page": reading.choice.direct_s,
                "staged_seconds_per_page": reading.choice.staged_s,
            }
            for reading in subject.readings
        ],
    }


def _owned_document(owned: Ownership) -> dict[str, int | None]:
    if isinstance(owned, Cyclic):
        return {"start": owned.start, "run": owned.run, "step": owned.step}
    return {"start": owned.start, "stop": owned.stop}


def _source_document(use: SourceUse) -> dict[str, Any]:
    return {
        "src_rank": use.src_rank,
        "readers": list(use.readers),
        "reporters": list(use.reporters),
        "bytes_per_token": number(use.bytes_per_token),
        "window_bytes_per_token": {str(tokens): number(size) for tokens, size in use.window_bytes},
        "state_bytes_per_request": number(use.state_bytes),
    }
