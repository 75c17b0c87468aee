"""The pairs of engines that are compared, and the request that moves between them.

A `Shape` is a model and two engines as `kvreshard plan` writes them, with what the in-tree class must be told beside. Pages:
16 tokens, and 1056 for the hybrid with states at TP 4, whose kernels see 16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from bench.intree import Pair
from bench.tables import page_table
from kvreshard.catalog import describe, load, parse_engine
from kvreshard.model import EngineLayout
from kvreshard.model.tables import PageTable, Request

# Random pages of a pool that is nearly full would be neighbours again.
SPARE = 4
# An H100: bf16 operations a second (twice as many in fp8), of which a prefill reaches half, and bytes a second from its memory.
PEAK_BF16 = 989e12
USED_SHARE = 0.5
MEMORY_BANDWIDTH = 3.35e12
# Two servers one after the other: HTTP, tokenizer, scheduler, launching kernels, the answer. One that serves nothing else takes 12.4 ms to
# the first token of 128 with Qwen3-0.6B on an A100, of which the prompt's operations are 1 ms (vLLM, 2025:
# https://github.com/tenstorrent/tt-inference-server/issues/340).
ENGINES_S = 2 * 0.010


@dataclass(frozen=True, slots=True)
class Weights:
    """Parameters of a model, all and those that one token uses, and bytes of each.

    `pair_operations`: of attention, for each pair of a token and one before it: a product with the key and one with the value, per head
    and layer. Layers with a window are left out.
    """

    total: float
    active: float
    bytes_each: int
    pair_operations: float


@dataclass(frozen=True, slots=True)
class Shape:
    """One pair of engines. `pair`: for rows beside the in-tree connector; `weights`: for those that estimate a first token."""

    name: str
    model: str
    src: str
    dst: str
    pair: Pair | None = None
    weights: Weights | None = None

    def layouts(self, pool: int) -> tuple[EngineLayout, EngineLayout]:
        """Both layouts, with pools of `pool` pages; addresses are made up."""
        model = load(self.model)
        return (
            describe(model, parse_engine(self.src), "prefill", pool),
            describe(model, parse_engine(self.dst), "decode", pool),
        )


def _mamba() -> Mapping[str, Any]:
    """Nemotron-3-Nano-30B's states at TP 4, as vLLM's own spec has them (DS order of the convolution)."""
    import torch

    return {
        "block_size": 1056, "shapes": ((1536, 3), (16, 64, 128)), "dtypes": (torch.bfloat16, torch.float32),
    }  # fmt: skip


def _attention(*, layers: int, heads: int, key: int, value: int) -> float:
    """`Weights.pair_operations`. `heads`: of queries; `key`, `value`: numbers per head. All as the models' own files say."""
    return 2.0 * layers * heads * (key + value)


def shapes() -> list[Shape]:
    """The models of the comparison. Llama at equal and at halved TP, the others at the TP they are run at."""
    llama = Weights(70.6e9, 70.6e9, 2, _attention(layers=80, heads=64, key=128, value=128))
    deepseek = Weights(671e9, 37e9, 1, _attention(layers=61, heads=128, key=192, value=128))
    gemma = Weights(31e9, 31e9, 2, _attention(layers=10, heads=32, key=512, value=512))
    nemotron = Weights(31.6e9, 3.6e9, 2, _attention(layers=6, heads=32, key=128, value=128))
    tp8, tp4 = "tp=8,order=HND", "tp=4,order=HND"
    hybrid = "tp=4,conv=dim-first,order=HND,kernel=16"
    states = Pair(2, 4, 4, 1056, src_kernel_blocks=66, dst_kernel_blocks=66, mamba=_mamba())
    return [
        Shape("Llama-3.1-70B TP 8 -> 8", "llama-3.1-70b", tp8, tp8, Pair(8, 8, 8, 16), llama),
        Shape("Llama-3.1-70B TP 8 -> 4", "llama-3.1-70b", tp8, tp4, Pair(8, 8, 4, 16), llama),
        Shape("DeepSeek-V3 TP 8 -> 8", "deepseek-v3", "tp=8", "tp=8", Pair(1, 8, 8, 16, is_mla=True), deepseek),
        Shape("DeepSeek-V3 TP 8 -> 4", "deepseek-v3", "tp=8", "tp=4", Pair(1, 8, 4, 16, is_mla=True), deepseek),
        Shape("Gemma-4-31B TP 4 -> 4", "gemma-4-31b", tp4, tp4, Pair(16, 4, 4, 16), gemma),
        Shape("Nemotron-3-Nano-30B TP 4 -> 4", "nemotron-3-nano-30b-a3b", hybrid, hybrid, states, nemotron),
    ]


def first_token_s(shape: Shape, num_tokens: int) -> float:
    """Seconds until the first token of such a prompt, estimated low: H100s, the cache's transfer for nothing.

    The prompt's operations, or reading all weights once where that takes longer; the decode engine's active weights once; `ENGINES_S`.
    A token attends to those before it, so attention grows with the square of the prompt: at 128k tokens it is more than half of Llama-3.1-70B's
    operations.
    """
    assert shape.pair is not None
    assert shape.weights is not None
    weights, prefill, decode = shape.weights, shape.pair.src_tp, shape.pair.dst_tp
    peak = PEAK_BF16 * 2 / weights.bytes_each
    operations = 2 * weights.active * num_tokens + weights.pair_operations * num_tokens**2 / 2
    compute_s = operations / (prefill * peak * USED_SHARE)
    reading_s = weights.total * weights.bytes_each / (prefill * MEMORY_BANDWIDTH)
    step_s = weights.active * weights.bytes_each / (decode * MEMORY_BANDWIDTH)
    return max(compute_s, reading_s) + step_s + ENGINES_S


def pages_per_request(layout: EngineLayout, num_tokens: int) -> dict[str, tuple[int, int]]:
    """Per group: the first logical page and how many pages a request of so many tokens has."""
    found = {}
    for group in layout.groups:
        if group.tokens_per_page is None:
            found[group.name] = (0, 1)
            continue
        first = max(0, num_tokens - (group.window_tokens or num_tokens)) // group.tokens_per_page
        found[group.name] = (first, -(-num_tokens // group.tokens_per_page) - first)
    return found


def pool_for(shape: Shape, num_tokens: int) -> int:
    """Pages that both pools need for one request of so many tokens, with some to spare."""
    layouts = shape.layouts(2)
    needed = max(sum(count for _, count in pages_per_request(layout, num_tokens).values()) for layout in layouts)
    return int(needed * SPARE) + 2


def request(src: EngineLayout, dst: EngineLayout, num_tokens: int, kind: str, seed: int = 0) -> Request:
    """One request with pages of one kind of table on both sides."""
    tables = []
    for side, layout in enumerate((src, dst)):
        counts = pages_per_request(layout, num_tokens)
        total = sum(count for _, count in counts.values())
        pages = page_table(kind, total, layout.groups[0].num_pages, seed + side)
        found, used = {}, 0
        for name, (first, count) in counts.items():
            found[name] = PageTable(pages[used : used + count], num_tokens, first)
            used += count
        tables.append(found)
    intervals = {}
    for group in dst.groups:
        first = 0
        if group.tokens_per_page is not None and group.window_tokens is not None:
            lows = [table[name].first_page * (layout.group_by_name[name].tokens_per_page or 0)
                    for table, layout in zip(tables, (src, dst), strict=True) for name in (group.name,)]  # fmt: skip
            first = max(lows)
        intervals[group.name] = [(first, num_tokens)]
    return Request(tables[0], tables[1], intervals, {})


def total_bytes(layout: EngineLayout, rank: int) -> int:
    """Memory of one rank."""
    return max((region.size_bytes for region in layout.rank_by_number[rank].regions), default=0)
