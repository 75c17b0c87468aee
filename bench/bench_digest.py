"""How fast is a digest, as a share of a plain copy of the same bytes in the same run, on one core?

For each layout: one rank's pages in shuffled order, 4 layers, digested through real addresses; beside it `np.copyto` of as
many bytes. Seconds are processor time of this process, and the best of five runs of each counts. Usage: `python bench/bench_digest.py [MiB per layout]`.
"""

import sys
import time
from collections.abc import Callable

import numpy as np

from kvreshard.kinds import Attention, Kind, Latent, Mamba1, Mamba2, Style
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble, relocate
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import compile_route
from kvreshard.tools import digest_lanes
from kvreshard.transport.local import HostMemory

NUM_LAYERS = 4
GQA = Attention(8, 128, "bfloat16")
MAMBA2 = Mamba2(64, 64, 8, 128, 4, "bfloat16", "float32")
CASES: dict[str, tuple[Kind, str, str, int]] = {
    "8 heads x 128 bf16, NHD, page 16": (GQA, "NHD", "cell", 16),
    "8 heads x 128 bf16, HND, page 16": (GQA, "HND", "cell", 16),
    "8 heads x 128 bf16, K and V apart, NHD": (GQA, "NHD", "separate", 16),
    "8 heads x 128 bf16, block-outermost": (GQA, "BLNHC", "cell", 16),
    "8 heads x 128 fp8, HND, page 16": (Attention(8, 128, "fp8_e4m3"), "HND", "cell", 16),
    "8 heads x 64 bf16, HND, page 16": (Attention(8, 64, "bfloat16"), "HND", "cell", 16),
    "latent 576 bf16, page 64": (Latent(576, "bfloat16"), "NHD", "cell", 64),
    "tiles, page 32": (GQA, "HND", "tiles", 32),
    "K transposed planes, page 32": (GQA, "HND", "planes-kt", 32),
    "Mamba-2 state, fp32": (MAMBA2, "NHD", "cell", 16),
    "Mamba-1 state, fp32": (Mamba1(8192, 16, 4, "bfloat16", "float32"), "NHD", "cell", 16),
}


def best_s(run: Callable[[], object], repeats: int = 5) -> float:
    found = []
    for _ in range(repeats):
        started_s = time.process_time()
        run()
        found.append(time.process_time() - started_s)
    return min(found)


def measure(name: str, kind: Kind, order: str, interior: str, page: int, size_bytes: int) -> None:
    num_layers = NUM_LAYERS if not kind.is_state else 24
    layers = [Layer(f"layers.{i}", kind) for i in range(num_layers)]
    group = PagedGroup("group", tuple(layer.name for layer in layers), page)
    style = Style(interior=interior)

    def build(num_pages: int):
        return assemble("bench", layers, [group], Grid(), order=order, num_pages=num_pages, style=style)

    per_page = build(1).ranks[0].regions[0].size_bytes
    num_pages = 1 if kind.is_state else max(1, size_bytes // per_page)
    layout = build(num_pages)
    content = np.random.default_rng(0).integers(0, 1 << 64, per_page * num_pages // 8 + 1, dtype=np.uint64)
    layout = relocate(layout, {0: {"kv": content.ctypes.data}})
    num_tokens = num_pages * page
    table = PageTable(np.random.default_rng(1).permutation(num_pages), num_tokens)
    found = {}

    lanes = compile_route(layout, layout, 0).lanes
    request = Request({"group": table}, {}, {"group": [(0, num_tokens)]}, {})

    def digest() -> None:
        found.update(digest_lanes(lanes, "src", request, HostMemory(), b"bench key"))

    digest_s = best_s(digest)
    num_bytes = sum(digest.num_bytes for digest in found.values())
    source, target = content.view(np.uint8)[:num_bytes], np.ones(num_bytes, dtype=np.uint8)
    copy_s = best_s(lambda: np.copyto(target, source))
    print(
        f"{name:<40} {num_bytes / 2**20:6.0f} MiB  {num_bytes / digest_s / 1e9:5.2f} GB/s, "
        f"{copy_s / digest_s:5.2f} of a plain copy at {num_bytes / copy_s / 1e9:.1f} GB/s"
    )


def main() -> None:
    size_bytes = int(sys.argv[1] if len(sys.argv) > 1 else 64) << 20
    for name, (kind, order, interior, page) in CASES.items():
        measure(name, kind, order, interior, page, size_bytes)


if __name__ == "__main__":
    main()
