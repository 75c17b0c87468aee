"""Causes for which a request is computed here although another engine has a part of it, as they are counted and logged."""

from __future__ import annotations

from collections.abc import Mapping

# Cause of a fallback -> why the request is computed here.
REASONS: Mapping[str, str] = {
    "itself": "this engine has prefilled it; what its prefix cache has of it is used",
    "host": "it names {remote.address} as its source, which is not among source_hosts; no rank contacts it",
    "role": (
        "a router sent the prefill of engine {remote.engine} to an engine whose kv_role is kv_producer, which does not load; send it to a "
        "kv_consumer, or make this engine kv_both"
    ),
    "answer": (
        "a router sent the answer of engine {remote.engine} with it, and this engine does not load answers; set bidirectional_kv_xfer to true "
        "here too"
    ),
    "unmet": "the answer that it goes on from cannot be read: {unmet}",
    "ended": "engine {remote.engine} holds the answer that it goes on from no longer: its time was over, or blocks were short there",
    "spent": "this engine has released its prefill before, after it was loaded, failed to load or was not needed",
    "reset": "the cache was reset after the request had arrived",
    "deadlock": (
        "nothing is computed or loaded while blocks are held for other engines, which may wait for one another in a circle; its source "
        "{remote.engine} gets its blocks back. Give these engines more blocks or less to prefill"
    ),
    "pool": (
        "the whole pool is free, and vLLM does not find the blocks to load it, which are more than to compute it where an engine has "
        "drafts; give this engine more blocks"
    ),
}
# These are usual where choices share a prefill or a router picks one engine twice.
EXPECTED = ("itself", "spent", "ended")
