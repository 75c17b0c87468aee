"""How is an `Explanation` shown: as tables for a person, as a document for a program?

One table per subject (fields that are read alike), one of the source ranks, then totals and warnings. Bytes in the tables are
rounded for reading; the document has every number exact.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from rich.console import Console

from kvreshard.cli.terminal import Column, Sheet, bytes_text, join_ranks, number, seconds_text, show_line, show_sheet
from kvreshard.model.ownership import Cyclic, Ownership
from kvreshard.model.text import counted
from kvreshard.plan.cost import Choice
from kvreshard.plan.explain import Explanation, Part, Reading, SourceUse, Subject, name_fields


def show_explanation(console: Console, explanation: Explanation, title: str) -> None:
    """Everything, tables first."""
    show_line(console, title)
    show_line(console, "")
    for subject in explanation.subjects:
        show_sheet(console, subject_sheet(subject))
    show_sheet(console, source_sheet(explanation))
    for line in closing_lines(explanation):
        show_line(console, line)


def subject_sheet(subject: Subject) -> Sheet:
    """Who reads these fields from whom."""
    runs = "runs per state" if subject.is_state else "runs per page"
    return Sheet(
        f"{name_fields(subject.fields)}\n{_groups_text(subject)}",
        (
            Column("decode rank"), Column("reads from"), Column("what"),
            Column("per request" if subject.is_state else "per token", right=True), Column(runs, right=True), Column("way"),
        ),
        tuple(_reading_row(reading) for reading in subject.readings),
        _reasons(subject),
    )  # fmt: skip


def _reasons(subject: Subject) -> tuple[str, ...]:
    """Why each way was taken, once per distinct choice."""
    ranks: dict[Choice, list[int]] = {}
    for reading in subject.readings:
        ranks.setdefault(reading.choice, []).extend(reading.dst_ranks)
    unit = "state" if subject.is_state else "page"
    sentences = []
    for choice, found in ranks.items():
        who = f" (decode rank {join_ranks(found)})" if len(ranks) > 1 else ""
        sentences.append(f"{choice.way}: {_why(choice, unit)}{who}")
    return tuple(sentences)


def _why(choice: Choice, unit: str) -> str:
    direct = f"{choice.num_runs:,} run{'s' if choice.num_runs != 1 else ''} one by one {seconds_text(choice.direct_s)}"
    reads = f"{choice.num_reads:,} read{'s' if choice.num_reads != 1 else ''} and a permutation {seconds_text(choice.staged_s)}"
    taken, other = (direct, reads) if choice.way == "direct" else (reads, direct)
    forced = "forced; " if choice.forced else ""
    return f"{forced}{taken} per {unit}, {other}"


def _groups_text(subject: Subject) -> str:
    src, dst = name_fields(subject.src_groups), name_fields(subject.dst_groups)
    groups = f"group {src}" if src == dst else f"group {src} -> {dst}"
    if subject.window_tokens is not None:
        groups += f", the last {subject.window_tokens:,} tokens"
    if subject.is_state:
        return f"{groups}, one page per request"
    sizes = dict.fromkeys((subject.src_tokens_per_page or 0, subject.dst_tokens_per_page or 0))
    plural = "" if list(sizes) == [1] else "s"
    return f"{groups}, pages of {' -> '.join(map(str, sizes))} token{plural}"


def _reading_row(reading: Reading) -> tuple[str, ...]:
    choice = reading.choice
    return (
        join_ranks(reading.dst_ranks),
        str(reading.src_rank),
        _parts_text(reading.parts),
        bytes_text(reading.num_bytes),
        f"{choice.num_runs:,} x {bytes_text(choice.run_bytes)}",
        choice.way,
    )


def _parts_text(parts: tuple[Part, ...]) -> str:
    return ", ".join(str(part) for part in parts if not part.is_whole) or "all"


def source_sheet(explanation: Explanation) -> Sheet:
    """What leaves each source rank, and who tells it when its pages are free."""
    has_states = bool(explanation.state_bytes)
    sizes = (Column("per token", right=True), *((Column("per request", right=True),) if has_states else ()))
    rows = []
    for use in explanation.sources:
        cells = [str(use.src_rank), join_ranks(use.readers), join_ranks(use.reporters), _per_token(use)]
        rows.append((*cells, *((bytes_text(use.state_bytes),) if has_states else ())))
    return Sheet(
        "prefill ranks",
        (Column("prefill rank"), Column("read by decode ranks"), Column("reported to by"), *sizes),
        tuple(rows),
    )


def _per_token(use: SourceUse) -> str:
    """What grows with a prompt, and what windows add while they keep the token."""
    windows = sum((size for _, size in use.window_bytes), Fraction(0))
    sizes = [bytes_text(use.bytes_per_token)] if use.bytes_per_token or not windows else []
    return " + ".join([*sizes, *([f"{bytes_text(windows)} in windows"] if windows else [])])


def closing_lines(explanation: Explanation) -> list[str]:
    """Totals, unread sources, warnings."""
    moved = []
    if explanation.bytes_per_token:
        moved.append(f"{bytes_text(explanation.bytes_per_token)} per token")
    for tokens, size in explanation.window_bytes.items():
        moved.append(f"{bytes_text(size)} per token of the last {tokens:,}")
    if explanation.state_bytes:
        moved.append(f"{bytes_text(explanation.state_bytes)} of states per request")
    together = " together" if len(explanation.dst_ranks) > 1 else ""
    whom = f"{counted(len(explanation.dst_ranks), 'decode rank')}{together}"
    what = " and ".join(filter(None, (", ".join(moved[:-1]), *moved[-1:]))) or "nothing"
    lines = [f"moved: {what}, to {whom}"]
    for use in explanation.unread:
        lines.append(
            f"prefill rank {use.src_rank} is read by nobody; decode rank {join_ranks(use.reporters)} tells it when its pages "
            "are free"
        )
    return [*lines, *(f"warning: {warning}" for warning in explanation.warnings)]


def explanation_document(explanation: Explanation, warnings: tuple[str, ...] = ()) -> dict[str, Any]:
    """The same as plain data. `warnings`: of the engines themselves."""
    return {
        "prefill_engine": explanation.src_engine,
        "decode_engine": explanation.dst_engine,
        "decode_ranks": list(explanation.dst_ranks),
        "subjects": [_subject_document(subject) for subject in explanation.subjects],
        "prefill_ranks": [_source_document(use) for use in explanation.sources],
        "bytes_per_token": number(explanation.bytes_per_token),
        "window_bytes_per_token": {str(tokens): number(size) for tokens, size in explanation.window_bytes.items()},
        "state_bytes_per_request": number(explanation.state_bytes),
        "warnings": [*warnings, *explanation.warnings],
    }


def _subject_document(subject: Subject) -> dict[str, Any]:
    return {
        "fields": list(subject.fields),
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
