"""A permute of memory of a device as one kernel, whatever the number of fields, pages and loops. Imports triton; used by `transport.device`.

1. A page of a field is a list of elements, as wide as all addresses and steps allow, run after run.
2. A program copies `BLOCK` of them: it finds the run of an element by division, and the run's place by the loops.
3. Numbers are arguments that Triton does not specialise on, so that there is one compilation per width.

Left to the caller: more loops than `MAX_LOOPS`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

MAX_LOOPS = 4
BLOCK = 1024
ELEMENTS = {8: tl.int64, 4: tl.int32, 2: tl.int16, 1: tl.int8}

_NUMBERS = (
    "src_address num_pages slot_bytes run_elements page_elements count1 count2 count3 "
    "src0 src1 src2 src3 dst0 dst1 dst2 dst3"
).split()


@triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]
def _permute(  # type: ignore[no-untyped-def]  # Triton reads the types off the arguments
    dst_bases, dst_pages, src_address, num_pages, slot_bytes, run_elements, page_elements, count1, count2, count3,
    src0, src1, src2, src3, dst0, dst1, dst2, dst3, ELEMENT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(0)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = element < page_elements
    run, inside = element // run_elements, (element % run_elements).to(tl.int64) * WIDTH
    at3, run = (run % count3).to(tl.int64), run // count3
    at2, run = (run % count2).to(tl.int64), run // count2
    at1, at0 = (run % count1).to(tl.int64), (run // count1).to(tl.int64)
    source = src_address + slot.to(tl.int64) * slot_bytes + at0 * src0 + at1 * src1 + at2 * src2 + at3 * src3 + inside
    page = tl.load(dst_bases + slot // num_pages) + tl.load(dst_pages + slot % num_pages)
    target = page + at0 * dst0 + at1 * dst1 + at2 * dst2 + at3 * dst3 + inside
    content = tl.load(source.to(tl.pointer_type(ELEMENT)), mask=is_there)
    tl.store(target.to(tl.pointer_type(ELEMENT)), content, mask=is_there)


def permute(
    src_address: int,
    slot_bytes: int,
    dst_bases: torch.Tensor,
    dst_pages: torch.Tensor,
    length: int,
    loops: Sequence[tuple[int, int, int]],
    width: int,
) -> None:
    """Copy `length` bytes per step of the loops from slots to pages, as `LocalMemory.move` says, on the current stream.

    `src_address`: of the first slot's first run. `dst_bases`, `dst_pages`: int64 on the device, shapes (fields,) and (pages,), the
    former with the offset of a page's first run. `width` divides the length and all addresses and steps: 1, 2, 4 or 8.
    """
    padded: list[tuple[int, int, int]] = [*[(1, 0, 0)] * (MAX_LOOPS - len(loops)), *loops]
    counts, src_steps, dst_steps = zip(*padded, strict=True)
    run_elements = length // width
    page_elements = run_elements
    for count in counts:
        page_elements *= count
    grid = (len(dst_bases) * len(dst_pages), triton.cdiv(page_elements, BLOCK))
    dst_bases, dst_pages = dst_bases.contiguous(), dst_pages.contiguous()  # the kernel steps from number to number
    launch: Any = _permute[grid]
    launch(
        dst_bases, dst_pages, src_address, len(dst_pages), slot_bytes, run_elements, page_elements, *counts[1:], *src_steps, *dst_steps,
        ELEMENT=ELEMENTS[width], WIDTH=width, BLOCK=BLOCK,
    )  # fmt: skip


def warm_up(device: torch.device) -> None:
    """Compile for every width, and see that bytes are right. Raises what Triton raises, and RuntimeError if they are not."""
    for width in ELEMENTS:
        source, target = (torch.full((4 * width,), fill, dtype=torch.uint8, device=device) for fill in (7, 0))
        numbers = torch.tensor([target.data_ptr(), 0], dtype=torch.int64, device=device)
        permute(source.data_ptr(), 4 * width, numbers[:1], numbers[1:], width, [(2, width, 2 * width)], width)
        found = target.cpu().tolist()
        wanted = [7] * width + [0] * width + [7] * width + [0] * width
        if found != wanted:
            raise RuntimeError(f"a permute of elements of {width} bytes left {found} instead of {wanted}")
