"""The first token that a source still has, and the first that the decode engine needs, of layers with windows, chunks or rings."""

from __future__ import annotations

from kvreshard.vllm.groups import CacheGroup
from kvreshard.vllm.params import RemotePrefill


def first_needed(prefill: RemotePrefill, group: CacheGroup, num_tokens: int) -> int:
    """The first token that the next one after `num_tokens` tokens needs of the group.

    Of a ring those whose compressed entry is not complete; a ring holds one entry or several whole ones (vLLM 0.32.0,
    `CircularBufferSpec`), so at most as many as the shorter one.
    """
    if group.ring_tokens is None:
        return group.first_needed(num_tokens)
    entry = min(group.ring_tokens, _shortest_ring(prefill) or group.ring_tokens)
    return num_tokens // entry * entry


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
