"""Do rows and scales lie where vLLM 0.32's kernels write them?"""

import numpy as np
import pytest

from kvreshard.kinds import Latent, ScaledRows, Style, indexer
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model import EngineLayout, LayoutError


def engine(
    kind: ScaledRows | Latent, page: int, *, grid: Grid | None = None, style: Style | None = None
) -> EngineLayout:
    layers = [Layer(f"layers.{index}", kind) for index in range(2)]
    groups = [PagedGroup("g", ("layers.0", "layers.1"), page)]
    return assemble("e", layers, groups, grid or Grid(), order="BLHNC", num_pages=3, style=style or Style())


def byte_of(layout: EngineLayout, field: str, state: int) -> tuple[int, int]:
    """Page index and byte from the page's start of a state's first channel, on rank 0."""
    shard = layout.ranks[0].shard_by_field[field]
    pages, offsets = shard.geometry.axis("token").locate(np.array([state]))
    return int(pages[0]), int(offsets[0]) + shard.offset_bytes


def test_indexer_values_then_scales_per_block_of_64() -> None:
    layout = engine(indexer(128), 128)
    block = 64 * 132
    assert byte_of(layout, "layers.0.index_k", 3) == (0, 3 * 128)
    assert byte_of(layout, "layers.0.index_scale", 3) == (0, 64 * 128 + 4 * 3)
    assert byte_of(layout, "layers.0.index_k", 64 + 5) == (0, block + 5 * 128)
    assert byte_of(layout, "layers.0.index_scale", 128 + 64 + 5) == (1, block + 64 * 128 + 4 * 5)


def test_a_page_shorter_than_a_block_is_one_block() -> None:
    layout = engine(indexer(128), 16)
    assert byte_of(layout, "layers.0.index_scale", 2) == (0, 16 * 128 + 4 * 2)
    layout = engine(indexer(128), 96)
    assert byte_of(layout, "layers.0.index_scale", 2) == (0, 96 * 128 + 4 * 2)


def test_packed_latents_of_compressed_tokens_in_aligned_pages() -> None:
    rows = ScaledRows(576, 8, "fp8_ds_mla", "latent", "latent_scale", 4, kernel_tokens=256, page_alignment_bytes=576)
    layout = engine(rows, 256)
    assert byte_of(layout, "layers.0.latent", 7) == (0, 7 * 576)
    assert byte_of(layout, "layers.0.latent_scale", 7) == (0, 64 * 576 + 7 * 8)
    assert byte_of(layout, "layers.1.latent", 64) == (1, 37440)
    assert layout.groups[0].tokens_per_page == 256
    assert layout.ranks[0].regions[0].size_bytes == 3 * 2 * 37440


def test_an_engines_kernel_blocks_count_tokens_not_states() -> None:
    rows = ScaledRows(8, 4, "q", tokens_per_state=4)
    layout = engine(rows, 64, style=Style(kernel_tokens=16))
    assert byte_of(layout, "layers.0.index_scale", 1) == (0, 4 * 8 + 4)
    assert byte_of(layout, "layers.0.index_k", 4) == (0, 4 * 12)


def test_context_parallel_ranks_take_whole_states() -> None:
    rows = ScaledRows(8, 4, "q", tokens_per_state=4)
    layout = engine(rows, 64, grid=Grid(tp_size=2, dcp_size=2, interleave=8))
    assert str(layout.ranks[1].shards[0].geometry.axis("token").owned) == "2 of every 4 from 2"
    for kind in (rows, Latent(8, "bfloat16", tokens_per_state=4)):
        with pytest.raises(LayoutError, match="gives 6 tokens at a time, which is no multiple of 4 tokens per state"):
            engine(kind, 64, grid=Grid(tp_size=2, dcp_size=2, interleave=6))


@pytest.mark.parametrize(
    "fields", [{"row_bytes": 0}, {"scale_bytes": -4}, {"tokens_per_state": 0}, {"kernel_tokens": 0}]
)
def test_sizes_must_be_positive(fields: dict[str, int]) -> None:
    with pytest.raises(LayoutError, match="must be positive"):
        ScaledRows(**{"row_bytes": 8, "scale_bytes": 4, **fields}, quantisation="q")
