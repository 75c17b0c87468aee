"""On a machine with a GPU: what share of the device's copy bandwidth does a staged permute reach? `python bench/gpu/permute.py`

A head split of a token-major page, as `plan.stage` moves it: slots of (tokens, heads, bytes) to pages of (tokens, bytes), with
torch's own indexing, beside a plain device copy of as many bytes. Without a device it runs on the CPU, as a test of itself.
Not part of `make bench`. Nothing here has been measured yet.
"""

from __future__ import annotations

import sys
import time

import torch

TOKENS, HEADS, HEAD_BYTES, PAGES = 16, 8, 512, 4096


def main() -> None:
    device = torch.device("cuda:0" if torch.cuda.is_available() else "cpu")
    pages = PAGES if device.type == "cuda" else 64
    slots = torch.randint(0, 255, (pages, TOKENS, HEADS, HEAD_BYTES), dtype=torch.uint8, device=device)
    cache = torch.zeros((2 * pages, TOKENS, HEAD_BYTES), dtype=torch.uint8, device=device)
    order = torch.randperm(2 * pages, device=device)[:pages]
    plain = torch.empty_like(cache[:pages])

    def permute() -> None:
        cache.index_copy_(0, order, slots[:, :, 3])

    def copy() -> None:
        plain.copy_(cache[:pages])

    permute()
    assert torch.equal(cache[order], slots[:, :, 3])
    seconds = [timed(work, device) for work in (permute, copy)]
    rates = [cache[:pages].numel() / second / 1e9 for second in seconds]
    sys.stdout.write(
        f"{device}: permute {rates[0]:.1f} GB/s, copy {rates[1]:.1f} GB/s, {rates[0] / rates[1]:.2f} of it\n"
    )


def timed(work: object, device: torch.device, times: int = 20) -> float:
    assert callable(work)
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    for _ in range(times):
        work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - started_s) / times


if __name__ == "__main__":
    main()
