"""On a machine with a GPU: what share of the device's copy bandwidth does a staged permute reach? `python bench/gpu/permute.py`

The connector's own permute (`transport.device`), of a head split of token-major pages, beside a plain
device copy of as many bytes; what has arrived is compared with indexing. Without a device it runs on the processor, as a test of
itself. Not part of `make bench`. Nothing here has been measured on a GPU yet.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import numpy as np
import torch

from kvreshard.transport.device import TensorMemory

TOKENS, HEADS, HEAD_BYTES, PAGES = 16, 8, 512, 4096
HEAD = 3


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    num_pages = PAGES if device.type == "cuda" else 64
    slots = torch.randint(0, 255, (num_pages, TOKENS, HEADS, HEAD_BYTES), dtype=torch.uint8, device=device)
    cache = torch.zeros((2 * num_pages, TOKENS, HEAD_BYTES), dtype=torch.uint8, device=device)
    order = torch.randperm(2 * num_pages)[:num_pages]
    memory = TensorMemory([slots, cache])
    token_bytes, page_bytes = HEADS * HEAD_BYTES, TOKENS * HEAD_BYTES
    base, pages = np.array([cache.data_ptr()]), order.numpy() * page_bytes
    plain = torch.empty_like(cache[:num_pages])

    def split_heads() -> None:
        loops = [(TOKENS, token_bytes, HEAD_BYTES)]
        memory.move(
            slots.data_ptr(),
            TOKENS * token_bytes,
            base,
            pages,
            HEAD_BYTES,
            loops,
            slot_offset=HEAD * HEAD_BYTES,
            dst_offset=0,
        )

    def copy() -> None:
        plain.copy_(cache[:num_pages])
        if device.type == "cuda":
            torch.cuda.synchronize()

    split_heads()
    assert torch.equal(cache[order.to(device)], slots[:, :, HEAD]), "the permute left other bytes"
    rates = [plain.numel() / timed(work) / 1e9 for work in (split_heads, copy)]
    sys.stdout.write(
        f"{device}: head split {rates[0]:.1f} GB/s, copy {rates[1]:.1f} GB/s, {rates[0] / rates[1]:.2f} of it\n"
    )


def timed(work: Callable[[], None], times: int = 20) -> float:
    """Seconds of one run, each of which waits for the device."""
    work()
    started_s = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started_s) / times


if __name__ == "__main__":
    main()
