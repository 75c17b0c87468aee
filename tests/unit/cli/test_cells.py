"""Is the cell that a report names the one that the planner would write there?"""

import numpy as np
import pytest

from kvreshard.catalog import describe, load, parse_engine, shrink
from kvreshard.cli.cells import find_cell
from kvreshard.model import EngineLayout
from kvreshard.testing.scenario import make_requests, pages_needed

ENGINES = [
    ("gemma-4-26b-a4b", 6, "tp=2"),
    ("gemma-4-26b-a4b", 6, "tp=2,order=HND"),
    ("deepseek-v3.2", 2, "tp=4,dcp=2,interleave=2"),
    ("jamba-1.5-mini", 8, "tp=2"),
]


def engine(name: str, num_layers: int, spec: str) -> EngineLayout:
    model = shrink(load(name), num_layers)
    return describe(model, parse_engine(spec), "e", pages_needed(describe(model, parse_engine(spec), "e"), 2, 100))


@pytest.mark.parametrize(("name", "num_layers", "spec"), ENGINES)
def test_cells_are_found_again(name: str, num_layers: int, spec: str) -> None:
    layout = engine(name, num_layers, spec)
    requests = make_requests(layout, layout, 2, 100, 1)
    rng = np.random.default_rng(1)
    for rank in layout.ranks:
        for shard in rank.shards:
            table = requests[1].dst_tables[shard.geometry.group]
            page = int(rng.integers(len(table.pages)))
            inside, told = 0, []
            for mapped in shard.geometry.axes:
                count = mapped.indices_per_page if mapped.num_held is None else mapped.num_held
                index = int(rng.integers(count))
                inside += int(mapped.locate(np.array([index]))[1][0])
                local = index + (table.first_page + page) * count if mapped.num_held is None else index
                told.append(f"{mapped.axis} {int(mapped.owned.to_global(np.array([local]))[0])}")
            offset = shard.offset_bytes + int(table.pages[page]) * shard.geometry.page_stride_bytes + inside
            wanted = f"field '{shard.field}', {', '.join(told)} of request 1"
            assert find_cell(layout, requests, rank.rank, shard.region, offset) == wanted


def test_bytes_without_a_cell_are_named_as_what_they_are() -> None:
    layout = engine("jamba-1.5-mini", 8, "tp=2")
    requests = make_requests(layout, layout, 1, 100, 1)
    group, slab = next(g for g in layout.groups if g.tokens_per_page is None), layout.ranks[0].slabs[0]
    page = int(requests[0].dst_tables[group.name].pages[0])
    padding = slab.offset_bytes + page * slab.page_stride_bytes + slab.page_bytes - 1
    told = find_cell(layout, requests, 0, slab.region, padding)
    assert told == f"page {page} of request 0, group '{group.name}', outside of every field (padding)"
    used = {int(p) for table in requests[0].dst_tables.values() for p in table.pages}
    free = next(p for p in range(group.num_pages) if p not in used)
    told = find_cell(layout, requests, 0, slab.region, slab.offset_bytes + free * slab.page_stride_bytes)
    assert told == f"page {free} of pool '{group.pool}', which belongs to no request of this run"
    assert find_cell(layout, requests, 0, slab.region, layout.ranks[0].regions[0].size_bytes) == "a byte of no page"
