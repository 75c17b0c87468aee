"""Can a program that knows docs/wire.md only, and shares no code with the planner, follow describe and plan --copies?

Real models between engines of different shapes: sampled cells must be copied from where the formula says, to where it says, and
the number of bytes must be that of all cells.
"""

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.cli.wire_formula import cell_address, page_and_byte

from kvreshard.model import wire
from kvreshard.model.tables import PageTable
from kvreshard.testing.scenario import make_requests, pages_needed

NUM_TOKENS = 150
SAMPLES_PER_FIELD = 3
PAIRS = [
    ("gemma-4-26b-a4b", "tp=2,page=16", "tp=3,page=24"),
    ("llama-3.1-8b", "tp=3,pp=10+12+10,order=HND", "tp=2"),
    ("deepseek-v3.2", "tp=4,dcp=2,interleave=2", "tp=2"),
    ("deepseek-v4-flash", "tp=2", "tp=1"),
    ("nemotron-3-nano-30b-a3b", "tp=1", "tp=2,spec=2"),
    ("jamba-1.5-mini", "tp=2", "tp=3,conv=dim-first"),
    ("qwen3-next-80b-a3b", "tp=2,spec=1", "tp=4"),
]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "prefill", "decode"), PAIRS)
def test_copies_follow_from_the_page(run, tmp_path: Path, run_seed: int, model: str, prefill: str, decode: str) -> None:
    files = []
    for name, engine in (("prefill", prefill), ("decode", decode)):
        pages = pages_needed(wire.decode(_described(run, model, engine, name, 8), "json"), 2, NUM_TOKENS)
        files.append(tmp_path / f"{name}.json")
        files[-1].write_bytes(_described(run, model, engine, name, pages))
    layouts = [wire.decode(file.read_bytes(), "json") for file in files]
    request = make_requests(layouts[0], layouts[1], 2, NUM_TOKENS, run_seed)[1]
    tables = {
        "prefill": {name: _table(table) for name, table in request.src_tables.items()},
        "decode": {
            name: {**_table(table), "new_pages": request.dst_new_pages[name].tolist()}
            for name, table in request.dst_tables.items()
        },
        "intervals": {name: list(found) for name, found in request.intervals.items()},
    }
    (tmp_path / "tables.json").write_text(json.dumps(tables))
    result = run("plan", *files, "--copies", "--tables", tmp_path / "tables.json")
    assert result.exit_code == 0, result.stderr
    check(*(json.loads(file.read_text()) for file in files), tables, result.stdout, random.Random(run_seed))


def _described(run, model: str, engine: str, name: str, pages: int) -> bytes:
    result = run("describe", "--model", model, "--engine", engine, "--name", name, "--pages", pages)
    assert result.exit_code == 0, result.stderr
    return result.stdout.encode()


def _table(table: PageTable) -> dict[str, Any]:
    return {"pages": table.pages.tolist(), "num_tokens": table.num_tokens, "first_page": table.first_page}


def check(src: dict[str, Any], dst: dict[str, Any], tables: dict[str, Any], lines: str, rng: random.Random) -> None:
    copies = np.array([list(json.loads(line).values()) for line in lines.splitlines()], dtype=np.int64)
    assert len(copies)
    copies = copies[np.argsort(copies[:, 3])]
    starts, stops = copies[:, 3], copies[:, 3] + copies[:, 4]
    assert (starts[1:] >= stops[:-1]).all(), "a byte is written twice"
    num_bytes = 0
    src_names = {field["name"] for field in src["fields"]}
    for rank in dst["ranks"]:
        for shard in rank["shards"]:
            if shard["field"] not in src_names:
                continue
            field = next(f for f in dst["fields"] if f["name"] == shard["field"])
            geometry = dst["geometries"][shard["geometry"]]
            owned = [
                _owned(m, a, tables["intervals"][geometry["group"]])
                for m, a in zip(geometry["axes"], field["axes"], strict=True)
            ]
            num_bytes += field["element_bytes"] * int(np.prod([len(found) for found in owned], dtype=np.int64))
            for _ in range(SAMPLES_PER_FIELD if all(owned) else 0):
                cell = {m["axis"]: rng.choice(found) for m, found in zip(geometry["axes"], owned, strict=True)}
                _check_cell(src, dst, tables, copies, rank["rank"], field, cell)
    assert num_bytes == int(copies[:, 4].sum())


def _owned(axis_map: dict[str, Any], axis: dict[str, Any], intervals: list[tuple[int, int]]) -> list[int]:
    """The coordinates that the page says are moved, and that the rank owns."""
    n = axis.get("tokens_per_index", 1)
    if axis["extent"] is not None:
        moved = list(range(axis["extent"])) if intervals else []
    else:
        up = n - 1 if axis.get("keep_partial") else 0
        moved = sorted({k for start, stop in intervals for k in range(start // n, (stop + up) // n)})
    found = []
    for coordinate in moved:
        try:
            page_and_byte(axis_map, coordinate)
        except AssertionError:
            continue
        found.append(coordinate)
    return found


def _check_cell(
    src: dict[str, Any],
    dst: dict[str, Any],
    tables: dict[str, Any],
    copies: np.ndarray,
    rank: int,
    field: dict[str, Any],
    cell: dict[str, int],
) -> None:
    to = _address(dst, tables["decode"], rank, field["name"], cell)
    sources = {r["rank"]: _address(src, tables["prefill"], r["rank"], field["name"], cell) for r in src["ranks"]}
    assert to is not None
    row = copies[np.searchsorted(copies[:, 3], to, side="right") - 1]
    src_rank, src_address, dst_rank, dst_address, length = row.tolist()
    assert dst_address <= to < to + field["element_bytes"] <= dst_address + length, (field["name"], cell)
    assert dst_rank == rank
    assert src_address + to - dst_address == sources[src_rank], (field["name"], cell)


def _address(layout: dict[str, Any], tables: dict[str, Any], rank: int, name: str, cell: dict[str, int]) -> int | None:
    shard = next((s for r in layout["ranks"] if r["rank"] == rank for s in r["shards"] if s["field"] == name), None)
    if shard is None:
        return None
    group = layout["geometries"][shard["geometry"]]["group"]
    is_state = next(g for g in layout["groups"] if g["name"] == group)["tokens_per_page"] is None
    table = tables[group]
    return cell_address(layout, rank, name, cell, table["pages"], 0 if is_state else table["first_page"])
