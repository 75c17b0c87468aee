"""The page of a plan: one HTML file that shows who reads what from whom, for a browser without a network.

1. What each rank holds is a list of bands, one per axis of its fields that the ranks of an engine share, and one of its layers.
2. Each pair of ranks that exchange anything has its figures at every size of the request: what `kvreshard plan` says for so many tokens.
3. Sentences say who reads what, and whether that is cheap or dear.
4. All of it is JSON inside `plan_page.html`. The script there draws and computes no figure; texts from outside never become markup.

Nothing is refused here: the routes are proved, and every request is priced.
"""

from __future__ import annotations

import html
import json
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Sequence
from fractions import Fraction
from functools import lru_cache
from importlib import resources
from string import Template
from typing import Any

from kvreshard.cli.inputs import Pair
from kvreshard.cli.output import bytes_text, seconds_text
from kvreshard.cli.plan_view import RequestCost, closing_lines, moved_text, parts_text, shorten, why_text
from kvreshard.cli.totals import PairTotal
from kvreshard.model import EngineLayout
from kvreshard.model.ownership import Interval, Ownership
from kvreshard.model.rank import Rank
from kvreshard.model.text import counted, escaped
from kvreshard.plan.cost import CostModel, Work
from kvreshard.plan.cover import count_common, exact_period, turn
from kvreshard.plan.explain import Explanation, Part, Reading, Subject, name_fields, number_ranges

# Of the slider; a request of `--tokens` may have more.
LARGEST_TOKENS = 1 << 17
# How many times as long as its bytes alone a request takes that is called cheap, or dear.
CHEAP, DEAR = 1.5, 4.0

Link = tuple[int, int]
"""Source rank, destination rank."""
Key = tuple[str, int | None]
"""Name and extent of an axis."""


class Numbering(dict[Hashable, int]):
    """Values in order of their first use, each with its number: alike ranks and links are written once."""

    def __call__(self, value: Hashable) -> int:
        return self.setdefault(value, len(self))


def request_sizes(pair: Pair) -> list[int]:
    """Tokens of the slider's steps: one page of the larger kind, twice as many, and so on."""
    groups = (*pair.prefill.groups, *pair.decode.groups)
    size, sizes = max((group.tokens_per_page or 1 for group in groups), default=1), []
    while size < LARGEST_TOKENS:
        sizes.append(size)
        size *= 2
    return [*sizes, LARGEST_TOKENS]


def plan_page(pair: Pair, explanation: Explanation, steps: Sequence[RequestCost], first: int, cost: CostModel) -> str:
    """The page. `steps`: the request in ascending sizes; the page opens with number `first`."""
    data = json.dumps(page_data(pair, explanation, steps, first, cost), separators=(",", ":"))
    for character in "<>&":
        data = data.replace(character, f"\\u{ord(character):04x}")
    template = (resources.files("kvreshard.cli") / "plan_page.html").read_text(encoding="utf-8")
    return Template(template).substitute(title=html.escape(escaped(pair.title)), data=data)


def page_data(
    pair: Pair, explanation: Explanation, steps: Sequence[RequestCost], first: int, cost: CostModel
) -> dict[str, Any]:
    """All that the page shows. Figures, series, holdings and readings are lists; what refers to them has their numbers."""
    readings, readings_of = _readings(explanation)
    totals: dict[Link, list[PairTotal]] = {
        (src, dst): [PairTotal(dst, src) for _ in steps] for src, dst in sorted(readings_of)
    }
    for step, priced in enumerate(steps):
        for total in priced.totals:
            totals[total.src_rank, total.dst_rank][step] = total
    of_rank: dict[tuple[str, int], list[PairTotal]] = {}
    for side, ranks in (("src", [use.src_rank for use in explanation.sources]), ("dst", explanation.dst_ranks)):
        for rank in ranks:
            of_rank[side, rank] = [PairTotal(rank, rank) for _ in steps]
    for (src, dst), link in totals.items():
        for step, total in enumerate(link):
            _add(of_rank["src", src][step], total)
            _add(of_rank["dst", dst][step], total)
    figures, series, holdings = Numbering(), Numbering(), Numbering()

    def number_of(link: list[PairTotal], *wholes: list[PairTotal]) -> int:
        return series(
            tuple(
                figures(_figure(total, tuple(whole[step].num_bytes for whole in wholes)))
                for step, total in enumerate(link)
            )
        )

    rows: dict[tuple[int, int, tuple[int, ...]], list[int]] = {}
    for (src, dst), link in totals.items():
        number = number_of(link, of_rank["dst", dst], of_rank["src", src])
        rows.setdefault((src, number, readings_of[src, dst]), []).append(dst)
    stems = _stems([*pair.prefill.fields, *pair.decode.fields])
    partial = _shared_axes(pair)
    sides = {
        side: [
            {
                "rank": rank.rank,
                "place": ", ".join(f"{axis} {number}" for axis, number in rank.place),
                "holds": holdings(_bands(layout, rank, stems, partial)),
                "series": number_of(of_rank[key, rank.rank]),
            }
            for rank in layout.ranks
            if (key, rank.rank) in of_rank
        ]
        for side, key, layout in (("prefill", "src", pair.prefill), ("decode", "dst", pair.decode))
    }
    return {
        "title": escaped(pair.title),
        "who": _who(explanation, readings_of.keys()),
        "moved": moved_text(explanation),
        "notes": [f"warning: {found}" for found in pair.warnings]
        + [f"note: {found}" for found in pair.notes]
        + list(closing_lines(explanation)),
        "first": first,
        "steps": [_step(priced, cost) for priced in steps],
        **sides,
        "links": [
            {"src": src, "dst": ranks, "ranks": number_ranges(ranks), "series": number, "readings": found}
            for (src, number, found), ranks in rows.items()
        ],
        "readings": readings,
        "holdings": [[{"text": text, "parts": parts} for text, parts in holding] for holding in _values(holdings)],
        "series": _values(series),
        "figures": [dict(figure) for figure in _values(figures)],
    }


def _values(numbered: Numbering) -> list[Any]:
    return list(numbered)


def _add(sums: PairTotal, total: PairTotal) -> None:
    sums.num_bytes += total.num_bytes
    sums.num_staged_bytes += total.num_staged_bytes
    sums.num_operations += total.num_operations
    sums.seconds += total.seconds


def _figure(total: PairTotal, wholes: tuple[int, ...]) -> tuple[tuple[str, Any], ...]:
    """Figures of a pair of ranks or of a rank, as numbers and as texts. `wholes`: bytes of both ranks of a pair."""
    way = "staged" if total.num_staged_bytes == total.num_bytes else "partly staged"
    return (
        ("num_bytes", total.num_bytes),
        ("num_staged_bytes", total.num_staged_bytes),
        ("num_operations", total.num_operations),
        ("seconds", total.seconds),
        ("bytes", _bytes_text(total.num_bytes)),
        ("staged", _bytes_text(total.num_staged_bytes)),
        ("copies", f"{total.num_operations:,}"),
        ("predicted", seconds_text(total.seconds)),
        ("shares", tuple(f"{total.num_bytes / max(1, whole):.3g}" for whole in wholes)),
        ("way", way if total.num_staged_bytes else "direct"),
    )


_bytes_text = lru_cache(maxsize=4096)(bytes_text)


def _readings(explanation: Explanation) -> tuple[list[dict[str, str]], dict[Link, tuple[int, ...]]]:
    """What is read of each set of fields, and which of it each pair of ranks exchanges."""
    found: list[dict[str, str]] = []
    numbers: defaultdict[Link, list[int]] = defaultdict(list)
    for subject in explanation.subjects:
        fields = shorten(name_fields(subject.fields))
        for reading in subject.readings:
            for dst in reading.dst_ranks:
                numbers[reading.src_rank, dst].append(len(found))
            found.append(_reading(subject, fields, reading))
    return found, {link: tuple(readings) for link, readings in numbers.items()}


def _reading(subject: Subject, fields: str, reading: Reading) -> dict[str, str]:
    window = f" of the last {subject.window_tokens:,}" if subject.window_tokens is not None else ""
    return {
        "fields": fields,
        "part": parts_text(reading),
        "size": f"{bytes_text(reading.num_bytes)} per {'request' if subject.is_state else f'token{window}'}",
        "why": f"{reading.choice.way}, {why_text(reading.choice, 'state' if subject.is_state else 'page')}",
    }


def _stem(field: str) -> str:
    """The layer of a field: its name up to the first number.

    >>> _stem("layers.7.attn.k"), _stem("latent")
    ('layers.7', 'latent')
    """
    words = field.split(".")
    at = next((index for index, word in enumerate(words) if word.isdecimal()), len(words) - 1)
    return ".".join(words[: at + 1])


def _stems(fields: Iterable[Any]) -> dict[str, int]:
    """The layers of both engines, and their places: names in order, numbers ascending."""
    found = list(dict.fromkeys(_stem(field.name) for field in fields))
    names = list(dict.fromkeys(stem.rpartition(".")[0] for stem in found))

    def place(stem: str) -> tuple[int, int]:
        name, _, last = stem.rpartition(".")
        return names.index(name), int(last) if last.isdecimal() else 0

    return {stem: index for index, stem in enumerate(sorted(found, key=place))}


def _held(layout: EngineLayout, rank: Rank) -> Iterator[tuple[Key, Ownership]]:
    """What a rank holds of each axis of its fields."""
    seen = set()
    for shard in rank.template.shards:
        if shard.geometry not in seen:
            seen.add(shard.geometry)
            extents = {axis.name: axis.extent for axis in layout.field_by_name[shard.field].axes}
            for mapped in rank.geometries[shard.geometry].axes:
                yield (mapped.axis, extents[mapped.axis]), mapped.owned


def _shared_axes(pair: Pair) -> set[Key]:
    """The axes of which some rank of either engine holds a part only."""
    return {
        key
        for layout in (pair.prefill, pair.decode)
        for rank in layout.ranks
        for key, owned in _held(layout, rank)
        if turn(key[1], owned).size < turn(key[1], owned).period
    }


def _bands(
    layout: EngineLayout, rank: Rank, stems: dict[str, int], partial: set[Key]
) -> tuple[tuple[str, tuple[tuple[float, float], ...]], ...]:
    """What a rank holds: (text, parts as start and length, the whole axis being 1)."""
    held = dict.fromkeys(_stem(shard.field) for shard in rank.template.shards)
    places = sorted(stems[stem] for stem in held)
    names = list(stems)
    layers = name_fields(names[place] for place in places) or "nothing"
    whole = "" if len(places) == len(stems) else f" of {counted(len(stems), 'layer')}"
    parts: list[list[int]] = []
    for place in places:
        if parts and parts[-1][0] + parts[-1][1] == place:
            parts[-1][1] += 1
        else:
            parts.append([place, 1])
    bands = [(shorten(layers) + whole, tuple((start / len(stems), size / len(stems)) for start, size in parts))]
    for key, owned in dict.fromkeys(_held(layout, rank)):
        if key in partial:
            start, size, period = turn(key[1], owned)
            text = str(Part(*key, () if size == period else (owned,)))
            bands.append((text, ((start / period, size / period),)))
    return tuple((text, tuple((round(a, 4), round(b, 4)) for a, b in parts)) for text, parts in bands)


def _who(explanation: Explanation, links: Iterable[Link]) -> str:
    """Who reads what from whom, in a sentence."""
    sources = dict.fromkeys(explanation.dst_ranks, 0)
    for _, dst in links:
        sources[dst] += 1
    least, most = min(sources.values()), max(sources.values())
    whom = f"each of {_from_to(least, most)} prefill ranks" if most > 1 else "one prefill rank"
    reads = "The decode rank reads" if len(sources) == 1 else "Each decode rank reads"
    layers = _layers_taken(explanation)
    return f"{reads} {' in '.join(filter(None, (_parts_taken(explanation), layers))) or 'everything'} from {whom}."


def _from_to(least: int, most: int) -> str:
    return str(most) if least == most else f"{least} to {most}"


def _parts_taken(explanation: Explanation) -> str:
    """How much of each axis a decode rank reads from one prefill rank: `1 of 8 heads`; empty if all of it."""
    parts: defaultdict[Key, defaultdict[object, set[Part]]] = defaultdict(lambda: defaultdict(set))
    for number, subject in enumerate(explanation.subjects):
        for reading in subject.readings:
            for part in reading.parts:
                for dst in reading.dst_ranks:
                    parts[part.axis, part.extent][number, reading.src_rank, dst].add(part)
    texts: defaultdict[str, list[str]] = defaultdict(list)
    for (axis, extent), taken in parts.items():
        shares = [sum(map(_share, found)) for found in taken.values()]
        if min(shares) < 1:
            period = extent or max(share.denominator for share in shares)
            texts[axis].append(f"{_from_to(int(min(shares) * period), int(max(shares) * period))} of {period}")
    return " and ".join(f"{', '.join(dict.fromkeys(found))} {axis}s" for axis, found in texts.items())


def _share(part: Part) -> Fraction:
    """The share of an axis that a part has."""
    first, second, *_ = (*part.owned, Interval(0, part.extent), Interval(0, part.extent))
    return Fraction(count_common(part.extent, first, second), exact_period(part.extent, (first, second)))


def _layers_taken(explanation: Explanation) -> str:
    """How many layers a decode rank reads from one prefill rank; empty if all of them."""
    subjects_of: defaultdict[Link, set[int]] = defaultdict(set)
    for number, subject in enumerate(explanation.subjects):
        for reading in subject.readings:
            for dst in reading.dst_ranks:
                subjects_of[reading.src_rank, dst].add(number)
    stems = [frozenset(map(_stem, subject.fields)) for subject in explanation.subjects]
    every = frozenset().union(*stems)
    counts = {len(frozenset().union(*(stems[n] for n in found))) for found in map(frozenset, subjects_of.values())}
    return f"{_from_to(min(counts), max(counts))} of {len(every)} layers" if counts and counts != {len(every)} else ""


def _step(priced: RequestCost, cost: CostModel) -> dict[str, Any]:
    """The sums of one size of the request, and whether that is cheap."""
    sums = PairTotal(0, 0)
    for total in priced.totals:
        _add(sums, total)
    sums.seconds = priced.slowest_s
    verdict, why = _judge(priced, sums, cost)
    figure = dict(_figure(sums, ()))
    copies = "1 copy" if sums.num_operations == 1 else f"{figure['copies']} copies"
    takes = f"{priced.what[:1].upper()}{priced.what[1:]} takes {copies} and {figure['predicted']}."
    return {"what": priced.what, "takes": takes, "verdict": verdict, "why": why, **figure}


def _judge(priced: RequestCost, sums: PairTotal, cost: CostModel) -> tuple[str, str]:
    """Cheap, moderate or dear, and why: the slowest decode rank's time, beside that of its bytes alone."""
    if not sums.num_bytes:
        return "nothing", "Nothing of this request is moved."
    slowest = max(priced.seconds_of, key=lambda rank: priced.seconds_of[rank])
    own = PairTotal(slowest, 0)
    for total in priced.totals:
        if total.dst_rank == slowest:
            _add(own, total)
    factor = own.seconds / cost.direct_s(Work(0, own.num_bytes, 0, 0, 0))
    mean = bytes_text(own.num_bytes // own.num_operations)
    if factor < CHEAP:
        return "cheap", f"{factor:.1f} times what the bytes alone would take; a copy has {mean} on average."
    if own.num_staged_bytes:
        reason = (
            "the wanted pieces are small or apart, so larger ones are read into a staging buffer and permuted there"
        )
    else:
        posting = own.num_operations * cost.copy_s / own.seconds
        reason = f"a copy has only {mean} on average, and {posting:.0%} of the time is spent on posting copies"
    verdict = "dear" if factor >= DEAR else "moderate"
    return verdict, f"{factor:.1f} times what the bytes alone would take, since {reason}."
