"""A permute of memory of a device as one kernel, whatever the number of fields, pages and loops. Imports triton; used by `transport.device`.

1. A piece of a field is a list of elements, as wide as all addresses and steps allow, run after run.
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
    "num_pieces run_elements piece_elements count1 count2 count3 src0 src1 src2 src3 dst0 dst1 dst2 dst3"
).split()


@triton.jit(do_not_specialize=_NUMBERS)  # type: ignore[untyped-decorator]
def _permute(  # type: ignore[no-untyped-def]  # Triton reads the types off the arguments
    src_bases, src_at, dst_bases, dst_at, num_pieces, run_elements, piece_elements, count1, count2, count3,
    src0, src1, src2, src3, dst0, dst1, dst2, dst3, ELEMENT: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    field, piece = tl.program_id(0) // num_pieces, tl.program_id(0) % num_pieces
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_there = element < piece_elements
    run, inside = element // run_elements, (element % run_elements).to(tl.int64) * WIDTH
    at3, run = (run % count3).to(tl.int64), run // count3
    at2, run = (run % count2).to(tl.int64), run // count2
    at1, at0 = (run % count1).to(tl.int64), (run // count1).to(tl.int64)
    source = (
        tl.load(src_bases + field)
        + tl.load(src_at + piece)
        + at0 * src0
        + at1 * src1
        + at2 * src2
        + at3 * src3
        + inside
    )
    target = (
        tl.load(dst_bases + field)
        + tl.load(dst_at + piece)
        + at0 * dst0
        + at1 * dst1
        + at2 * dst2
        + at3 * dst3
        + inside
    )
    content = tl.load(source.to(tl.pointer_type(ELEMENT)), mask=is_there)
    tl.store(target.to(tl.pointer_type(ELEMENT)), content, mask=is_there)


def permute(
    src_bases: torch.Tensor,
    src_at: torch.Tensor,
    dst_bases: torch.Tensor,
    dst_at: torch.Tensor,
    length: int,
    loops: Sequence[tuple[int, int, int]],
    width: int,
) -> None:
    """Copy `length` bytes per step of the loops, as `plan.stage.Move` says, on the current stream; addresses on both sides.

    Bases and places are int64 on the device, shapes (fields,) and (pieces,). `width` divides the length and all addresses and steps: 1, 2, 4
    or 8. `loops`: count, step at the source, step at the destination, in bytes.
    """
    padded: list[tuple[int, int, int]] = [*[(1, 0, 0)] * (MAX_LOOPS - len(loops)), *loops]
    counts, src_steps, dst_steps = zip(*padded, strict=True)
    run_elements = length // width
    piece_elements = run_elements
    for count in counts:
        piece_elements *= count
    grid = (len(dst_bases) * len(dst_at), triton.cdiv(piece_elements, BLOCK))
    columns = [
        column.contiguous() for column in (src_bases, src_at, dst_bases, dst_at)
    ]  # the kernel steps from number to number
    launch: Any = _permute[grid]
    launch(
        *columns, len(dst_at), run_elements, piece_elements, *counts[1:], *src_steps, *dst_steps,
        ELEMENT=ELEMENTS[width], WIDTH=width, BLOCK=BLOCK,
    )  # fmt: skip


def warm_up(device: torch.device) -> None:
    """Compile for every width, and see that bytes are right. Raises what Triton raises, and RuntimeError if they are not."""
    for width in ELEMENTS:
        source, target = (torch.full((4 * width,), fill, dtype=torch.uint8, device=device) for fill in (7, 0))
        numbers = torch.tensor([source.data_ptr(), target.data_ptr(), 0], dtype=torch.int64, device=device)
        permute(numbers[:1], numbers[2:], numbers[1:2], numbers[2:], width, [(2, width, 2 * width)], width)
        found = target.cpu().tolist()
        wanted = [7] * width + [0] * width + [7] * width + [0] * width
        if found != wanted:
            raise RuntimeError(f"a permute of elements of {width} bytes left {found} instead of {wanted}")
