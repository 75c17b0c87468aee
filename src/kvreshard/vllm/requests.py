"""What does this package need to know of vLLM's requests and configuration, to speak about a request?"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvreshard.vllm.adapters import Adapters
from kvreshard.vllm.prompt import Prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request

# vLLM computes the last token of a prompt in any case. A table made for all of them has lost what that token still looks at where a
# window or a chunk then begins on the border of a page (docs/design/0024).
MIN_COMPUTED_TOKENS = 1


def read_prompt(request: Request, adapters: Adapters) -> Prompt:
    """All tokens of a request so far, with what stands for them: multimodal items by vLLM's hash and their tokens, the adapter by its
    name and digest.

    A prompt given as embeddings has no token ids; vLLM puts zeros there, and the embeddings' bytes are an item at its start.
    """
    items = [
        (int(f.mm_position.offset), f"{f.mm_hash or f.identifier}/{int(f.mm_position.length)}")
        for f in request.mm_features
    ]
    embeds = getattr(request, "prompt_embeds", None)
    if embeds is not None:
        items.append((0, hash_tensor(embeds)))
    return Prompt(request.all_token_ids, tuple(items), adapters.identify(request.lora_request))


def count_settled(request: Request) -> int:
    """Tokens of a finished request whose cache has been written.

    vLLM counts those of a step that is still under way, where one was begun before the end was known, and drafts that were right but
    behind the end.
    """
    return int(min(request.num_computed_tokens - request.num_in_flight_tokens, len(request.all_token_ids)))


def hash_tensor(tensor: Any) -> str:
    """A digest of a tensor's bytes."""
    import hashlib

    import torch

    return hashlib.blake2b(tensor.detach().cpu().contiguous().view(torch.uint8).numpy(), digest_size=8).hexdigest()


def count_backoff(vllm_config: Any, has_state: bool) -> int:
    """Trailing prompt tokens that the decode side computes itself: one for states, which are stepped and not recomputed; all
    but one of the drafter's lookahead with multi-module MTP, whose cache would hold unverified drafts (vLLM 0.32.0,
    `nixl/base_scheduler.py`, `_prefill_backoff`).
    """
    return max(int(has_state), int(vllm_config.num_prefill_lookahead_tokens) - 1)


def needs_whole_prompts(vllm_config: Any) -> bool:
    """Whether every token of a prompt looks at all of it, so that the cache of a prefix depends on what follows (HRM-Text, `prefix_lm`)."""
    text = getattr(vllm_config.model_config, "hf_text_config", None)
    return bool(getattr(text, "prefix_lm", False))


def read_sizes(parallel_config: Any) -> dict[str, int]:
    """The parallel sizes that `kv_transfer_params` carry, by the names that routers know."""
    return {
        "tp_size": max(parallel_config.tensor_parallel_size, parallel_config.decode_context_parallel_size),
        "dcp_size": parallel_config.decode_context_parallel_size,
        "pp_size": parallel_config.pipeline_parallel_size,
    }
