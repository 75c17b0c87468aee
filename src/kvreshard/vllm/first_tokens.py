"""The first token that a source still has of layers with windows, chunks or rings, and whether a ring has gone on too far."""

from __future__ import annotations

import math

from kvreshard.vllm.groups import CacheGroup
from kvreshard.vllm.params import RemotePrefill


def is_entry_gone(prefill: RemotePrefill, ring_tokens: int, num_tokens: int) -> bool:
    """Whether the source may have lost tokens of the entry that is not complete after `num_tokens` tokens.

    A ring holds one compressed entry or several whole ones (vLLM 0.32.0, `CircularBufferSpec`), of a size that a scheduler is not told: it
    divides the rings of both sides. A prefill leaves the tokens of one entry at its end, however many the ring has room for.
    """
    rings = [group.ring_tokens for group in prefill.groups if group.ring_tokens is not None]
    if not rings:
        return num_tokens % ring_tokens > 0
    largest = math.gcd(ring_tokens, *rings)
    return any(
        num_tokens % size and num_tokens // size * size < prefill.num_tokens - size
        for size in range(1, largest + 1)
        if largest % size == 0
    )


def first_token(prefill: RemotePrefill, group: CacheGroup) -> int:
    """The first token that the source still has in every group of layers that look back as far as this one's, or in every ring."""
    if group.ring_tokens is not None:
        return max(0, prefill.num_tokens - _shortest_ring(prefill))
    return max(
        (
            theirs.first_held
            for theirs in prefill.groups
            if theirs.page_tokens is not None and (theirs.window_tokens, theirs.chunk_tokens) == group.reach
        ),
        default=0,
    )


def _shortest_ring(prefill: RemotePrefill) -> int:
    """Tokens that all rings of the source hold; 0 if it says of none."""
    return min((group.ring_tokens for group in prefill.groups if group.ring_tokens is not None), default=0)
