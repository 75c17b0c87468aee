"""Is the plan of one small pair per cache kind still the one that a person has read?

`plans/*.txt` say in words what the two engines hold, then list every copy: rank, page, byte, and the cells it moves. Each was
compared by hand with what the kind's description says. Where a plan changes for a good reason, `UPDATE_GOLDEN=1` writes the
files anew; read them before committing.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from tests.pairs.small import GROUP, engine

from kvreshard.kinds import Attention, GatedDelta, Kind, Latent, Mamba1, Mamba2, Opaque, Ring, ScaledRows, Style
from kvreshard.model import EngineLayout, Rank
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import bind, compile_route, find_unwritten

PLANS = Path(__file__).parent / "plans"


@dataclass(frozen=True)
class Case:
    """A kind, both engines' arguments for `small.engine`, and a request."""

    kind: Kind
    src: dict[str, object]
    dst: dict[str, object]
    tokens: tuple[int, int]
    src_pages: tuple[int, ...]
    dst_pages: tuple[int, ...]
    new_pages: tuple[int, ...] = ()
    src_first_page: int = 0
    dst_first_page: int = 0


CASES = {
    "attention-cell": Case(
        Attention(2, 2, "bfloat16"),
        {"tp": 2, "page": 4, "order": "NHD"},
        {"tp": 1, "page": 6, "order": "HND"},
        (1, 8),
        (5, 2),
        (3, 7),
        (3, 7),
    ),
    "attention-separate-to-slots": Case(
        Attention(2, 2, "bfloat16"),
        {"page": 3, "order": "HND", "style": Style(interior="separate")},
        {"tp": 2, "page": 4, "order": "NHD", "style": Style(interior="slots")},
        (0, 5),
        (1, 2),
        (4, 6),
    ),
    "attention-planes-to-planes-kt": Case(
        Attention(1, 2, "bfloat16", 1),
        {"page": 4, "order": "HND", "style": Style(interior="planes")},
        {"page": 2, "order": "HND", "style": Style(interior="planes-kt")},
        (1, 4),
        (3,),
        (6, 4),
    ),
    "attention-tiles": Case(
        Attention(1, 2, "float32", 16),
        {"page": 16, "order": "HND", "style": Style(interior="tiles")},
        {"page": 2, "order": "NHD"},
        (14, 17),
        (3, 1),
        (5, 2),
        dst_first_page=7,
    ),
    "attention-more-ranks-than-heads": Case(
        Attention(2, 1, "bfloat16"),
        {"tp": 4, "page": 2, "order": "NHD"},
        {"tp": 3, "page": 2, "order": "NHD"},
        (0, 2),
        (1,),
        (2,),
    ),
    "attention-context-parallel": Case(
        Attention(1, 1, "bfloat16"),
        {"tp": 2, "dcp": 2, "page": 2, "order": "NHD"},
        {"tp": 3, "dcp": 3, "interleave": 2, "page": 2, "order": "NHD"},
        (0, 8),
        (4, 1),
        (3, 2),
    ),
    "attention-pipeline": Case(
        Attention(1, 2, "bfloat16"),
        {"stages": (0, 0, 1), "page": 2, "order": "BLNHC"},
        {"stages": (0, 1, 1), "page": 2, "order": "NHD"},
        (0, 4),
        (2, 3),
        (5, 6),
    ),
    "latent-compressed": Case(
        Latent(2, "bfloat16", tokens_per_state=2),
        {"tp": 2, "page": 4},
        {"tp": 2, "page": 6},
        (3, 11),
        (8, 2, 3),
        (1, 4),
        (4,),
    ),
    "scaled-rows": Case(
        ScaledRows(3, 1, "fp8", kernel_tokens=2),
        {"page": 4},
        {"page": 3},
        (0, 4),
        (1,),
        (2, 3),
    ),
    "mamba2-fewer-groups-than-ranks": Case(
        Mamba2(4, 1, 2, 2, 3, "bfloat16", "float32"),
        {"tp": 1, "style": Style(conv_dim_first=True)},
        {"tp": 4, "style": Style(conv_dim_first=False, speculative_tokens=1)},
        (0, 9),
        (6,),
        (3,),
        (3,),
    ),
    "mamba1": Case(
        Mamba1(3, 2, 3, "bfloat16", "float32"),
        {"tp": 2, "style": Style(conv_dim_first=True)},
        {"tp": 3, "style": Style(conv_dim_first=False)},
        (0, 9),
        (6,),
        (3,),
    ),
    "gated-delta": Case(
        GatedDelta(1, 2, 2, 1, 3, "bfloat16", "bfloat16"),
        {"tp": 2, "style": Style(speculative_tokens=2)},
        {"tp": 1},
        (0, 9),
        (6,),
        (3,),
    ),
    "ring": Case(
        Ring(3, 2, "bfloat16"),
        {"tp": 1, "style": Style(speculative_tokens=2)},
        {"tp": 2},
        (5, 8),
        (4,),
        (7,),
        (7,),
    ),
    "opaque": Case(
        Opaque(7, 4, "backend/x"),
        {"tp": 2, "page": 4, "order": "NHD"},
        {"tp": 2, "page": 4, "order": "HND", "padded_page_bytes": 10},
        (0, 6),
        (2, 3),
        (5, 6),
        (5, 6),
    ),
}


def request_of(case: Case) -> Request:
    stop = case.tokens[1]
    return Request(
        {GROUP: PageTable(case.src_pages, stop, case.src_first_page)},
        {GROUP: PageTable(case.dst_pages, stop, case.dst_first_page)},
        {GROUP: [case.tokens]},
        {GROUP: np.array(case.new_pages, dtype=np.int64)},
    )


def labels(layout: EngineLayout, rank: Rank, table: PageTable, tokens: tuple[int, int]) -> dict[int, str]:
    """Address -> the cell whose byte lies there, of every cell that the tokens name and the rank holds."""
    found: dict[int, str] = {}
    for shard in rank.shards:
        about = layout.field_by_name[shard.field]
        cells: list[tuple[str, int, int]] = [("", 0, 0)]
        for axis, mapped in zip(about.axes, shard.geometry.axes, strict=True):
            low, high = (0, axis.extent) if axis.extent is not None else axis.indices_of(*tokens)
            here = np.arange(low, high, dtype=np.int64)
            here = here[mapped.owned.contains(here)]
            pages, offsets = mapped.locate(mapped.owned.to_local(here))
            cells = [
                (f"{name} {axis.name} {c}", page + p, offset + o)
                for name, page, offset in cells
                for c, p, o in zip(here.tolist(), pages.tolist(), offsets.tolist(), strict=True)
            ]
        goes_on = any(m.num_held is None and m.ring_pages is None for m in shard.geometry.axes)
        for name, page, offset in cells:
            page_id = int(table.pages[page - (table.first_page if goes_on else 0)])
            start = rank.base_address(shard) + page_id * shard.geometry.page_stride_bytes + offset
            for byte in range(about.element_bytes):
                found[start + byte] = shard.field + name
    return found


def place(rank: Rank, address: int, num_pages: int = 10) -> str:
    """Where an address lies: "rank 0 page 3 +8", bytes counted from the first slab of the page."""
    region = rank.regions[0]
    offset = address - region.address
    slabs = [
        (slab, *divmod(offset - slab.offset_bytes, slab.page_stride_bytes))
        for slab in rank.slabs
        if offset >= slab.offset_bytes
    ]
    slab, page, byte = next(e for e in slabs if e[2] < e[0].page_bytes and e[1] < num_pages)
    several = f" tensor {rank.slabs.index(slab)}" if len(rank.slabs) > 1 else ""
    return f"rank {rank.rank}{several} page {page} +{byte}"


def sentences(layout: EngineLayout) -> Iterator[str]:
    group = layout.groups[0]
    pages = "states" if group.tokens_per_page is None else f"pages of {group.tokens_per_page} tokens"
    yield f"{layout.engine}: {len(layout.ranks)} ranks, {pages}"
    for rank in layout.ranks:
        for shard in rank.shards:
            axes = map(str, shard.geometry.axes)
            size = layout.field_by_name[shard.field].element_bytes
            stride = shard.geometry.page_stride_bytes
            yield f"  rank {rank.rank} {shard.field}, {size} B from +{shard.offset_bytes}, page every {stride}: {'; '.join(axes)}"


def plan_of(case: Case) -> str:
    """The whole text of a golden file. Asserts on the way that each byte goes to a byte of the same cell."""
    src = engine("prefill", kind=case.kind, **case.src)
    dst = engine("decode", kind=case.kind, **case.dst)
    request = request_of(case)
    lines = [f"{type(case.kind).__name__}: {case.kind}", "", *sentences(src), "", *sentences(dst), ""]
    lines.append(
        f"tokens [{case.tokens[0]}, {case.tokens[1]}) from pages {list(case.src_pages)} (first is logical page "
        f"{case.src_first_page}) to pages {list(case.dst_pages)} (first is {case.dst_first_page}); new are {list(case.new_pages)}"
    )
    for rank in dst.ranks:
        route = compile_route(src, dst, rank.rank)
        told = labels(dst, rank, request.dst_tables[GROUP], case.tokens)
        lines += ["", f"rank {rank.rank} of decode:"]
        lists = list(bind(route, request))
        for copies in lists:
            src_rank = src.rank_by_number[copies.src_rank]
            known = labels(src, src_rank, request.src_tables[GROUP], case.tokens)
            for src_at, dst_at, length in zip(copies.src_address, copies.dst_address, copies.length, strict=True):
                src_at, dst_at, length = int(src_at), int(dst_at), int(length)
                moved = [known.get(src_at + i) for i in range(length)]
                assert None not in moved
                assert moved == [told.pop(dst_at + i, None) for i in range(length)]
                first, last = moved[0], moved[-1]
                what = first if first == last else f"{first} ... {last}"
                lines.append(f"  {place(src_rank, src_at)} -> {place(rank, dst_at)}, {length} B: {what}")
        assert not told, f"nothing is copied to {sorted(set(told.values()))}"
        holes = find_unwritten(dst, rank.rank, request, lists)
        lines += [
            f"  zero {stop - start} B from {place(rank, int(start))}"
            for start, stop in zip(holes.start, holes.stop, strict=True)
        ]
        lines.append(f"  reports to {[src_rank for src_rank, to in route.reporters.items() if rank.rank in to]}")
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize("name", CASES)
def test_plan(name: str) -> None:
    path, text = PLANS / f"{name}.txt", plan_of(CASES[name])
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text(encoding="utf-8"), f"the plan of {name} has changed; UPDATE_GOLDEN=1 writes it anew"


def test_no_plan_is_left_over() -> None:
    assert {path.stem for path in PLANS.glob("*.txt")} == set(CASES)


def test_every_kind_has_a_plan() -> None:
    kinds = {type(case.kind) for case in CASES.values()}
    assert kinds == {Attention, GatedDelta, Latent, Mamba1, Mamba2, Opaque, Ring, ScaledRows}
