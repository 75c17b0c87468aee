"""What does this package need to know of vLLM's requests and configuration, to speak about a request?"""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

from kvreshard.vllm.adapters import Adapters
from kvreshard.vllm.items import Positions, read_items
from kvreshard.vllm.prompt import Prompt

if TYPE_CHECKING:
    from vllm.v1.request import Request

# vLLM computes the last token of a prompt in any case. A table made for all of them has lost what that token still looks at where a
# window or a chunk then begins on the border of a page (docs/design/0024).
MIN_COMPUTED_TOKENS = 1


def read_prompt(request: Request, adapters: Adapters, positions: Positions = Positions.PLAIN) -> Prompt:
    """All tokens of a request so far, with what stands for them: multimodal items, the adapter by its name and digest, prompt
    embeddings by a digest, and the `cache_salt`.

    A prompt given as embeddings has no token ids; vLLM puts zeros there.
    """
    return Prompt(
        request.all_token_ids,
        read_items(request.mm_features, positions),
        adapters.identify(request.lora_request),
        digest_embeds(request),
        request.cache_salt or "",
    )


def count_settled(request: Request) -> int:
    """Tokens of a finished request whose cache has been written.

    vLLM counts those of a step that is still under way, where one was begun before the end was known, and drafts that were right but
    behind the end.
    """
    return int(min(request.num_computed_tokens - request.num_in_flight_tokens, len(request.all_token_ids)))


def digest_embeds(request: Request) -> str:
    """A digest of a request's prompt embeddings and of which tokens they stand for; empty without."""
    if request.prompt_embeds is None:
        return ""
    import torch

    embeds = request.prompt_embeds.detach().cpu().contiguous()
    about = (str(embeds.dtype), tuple(embeds.shape), bytes(request.prompt_is_token_ids or ()))
    digest = hashlib.blake2b(repr(about).encode(), digest_size=16)
    digest.update(embeds.view(torch.uint8).numpy())
    return digest.hexdigest()


def read_positions(vllm_config: Any) -> Positions:
    """What the positions of a prompt's tokens depend on."""
    model = vllm_config.model_config
    if not model.uses_mrope:
        return Positions.PLAIN
    is_pruned = model.multimodal_config is not None and model.multimodal_config.is_multimodal_pruning_enabled()
    return Positions.PRUNED if is_pruned else Positions.GRID


def read_placeholders(vllm_config: Any) -> frozenset[int]:
    """Token ids that stand for pictures, videos and audio, as far as the model's configuration names them."""
    config = vllm_config.model_config.hf_config
    names = (f"{kind}_{word}" for kind in ("image", "video", "audio") for word in ("token_id", "token_index"))
    found = (getattr(config, name, None) for name in names)
    return frozenset(number for number in found if isinstance(number, int))


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
