"""What the scheduler side reads from vLLM's configuration and requests, and how it ends a request."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from kvreshard.model import KvReshardError
from kvreshard.model.logs import fields, get_logger
from kvreshard.vllm.adapters import Adapters
from kvreshard.vllm.describe.model_config import has_draft
from kvreshard.vllm.groups import CacheGroup, read_groups
from kvreshard.vllm.items import Positions, read_items
from kvreshard.vllm.prompt import Prompt
from kvreshard.vllm.versions import release

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)

# vLLM computes the last token of a prompt in any case. A block table for all tokens has lost what that token still attends to where a
# window or a chunk then begins on the border of a page (docs/design/0024).
MIN_COMPUTED_TOKENS = 1


class RequestRefused(KvReshardError):
    """The request can be neither loaded nor computed here; the message says why."""


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """One engine, as its scheduler side needs it.

    `num_backoff_tokens`: trailing prompt tokens that the decode side computes. `placeholders`: token ids that stand for multimodal items.
    `whole_prompts`: all tokens of a prompt attend to all of it, so that the cache of a prefix depends on what follows (HRM-Text).
    `may_load`: the engine's role loads. `num_draft_tokens`: the latest tokens of a request whose draft cache may not be
    final, since the draft writes it after the token was sampled. `sizes`: tp_size, dcp_size and pp_size, as routers know them.
    """

    groups: tuple[CacheGroup, ...]
    adapters: Adapters = field(default_factory=Adapters)
    num_backoff_tokens: int = 0
    positions: Positions = Positions.PLAIN
    placeholders: frozenset[int] = frozenset()
    whole_prompts: bool = False
    may_load: bool = True
    num_draft_tokens: int = 0
    sizes: Mapping[str, int] = field(default_factory=dict)


def read_config(vllm_config: Any, kv_cache_config: Any) -> EngineConfig:
    """The configuration of the engine in this process."""
    parallel = vllm_config.parallel_config
    groups = read_groups(kv_cache_config, parallel.decode_context_parallel_size)
    return EngineConfig(
        groups=groups,
        adapters=Adapters(vllm_config.lora_config),
        num_backoff_tokens=_count_backoff(vllm_config, any(group.is_state for group in groups)),
        positions=read_positions(vllm_config),
        placeholders=read_placeholders(vllm_config),
        whole_prompts=needs_whole_prompts(kv_cache_config),
        may_load=bool(vllm_config.kv_transfer_config.is_kv_consumer),
        num_draft_tokens=1 + vllm_config.speculative_config.num_speculative_tokens if has_draft(vllm_config) else 0,
        sizes={
            "tp_size": max(parallel.tensor_parallel_size, parallel.decode_context_parallel_size),
            "dcp_size": parallel.decode_context_parallel_size,
            "pp_size": parallel.pipeline_parallel_size,
        },
    )


def read_positions(vllm_config: Any) -> Positions:
    """What the positions of a prompt's tokens depend on."""
    model = vllm_config.model_config
    if not model.uses_mrope:
        return Positions.PLAIN
    is_pruned = model.multimodal_config is not None and model.multimodal_config.is_multimodal_pruning_enabled()
    return Positions.PRUNED if is_pruned else Positions.GRID


def read_placeholders(vllm_config: Any) -> frozenset[int]:
    """Token ids that stand for pictures, videos and audio, as far as the model's configuration names them.

    `names` has the usual ones, then those of Kimi, Molmo and Ernie. Qwen's omni models keep theirs in `thinker_config`. A model that finds them in
    the tokenizer has none here.
    """
    config = vllm_config.model_config.hf_config
    kinds = [f"{kind}_{word}" for kind in ("image", "video", "audio") for word in ("token_id", "token_index")]
    names = (*kinds, "media_placeholder_token_id", "image_patch_id", "im_patch_id")
    places = (config, getattr(config, "thinker_config", None))
    found = (getattr(place, name, None) for place in places for name in names)
    return frozenset(number for number in found if isinstance(number, int))


def needs_whole_prompts(kv_cache_config: Any) -> bool:
    """See `EngineConfig.whole_prompts`. The layers say so: vLLM does not ask a model's configuration (`PrefillPrefixLMAttention`)."""
    specs = (group.kv_cache_spec for group in kv_cache_config.kv_cache_groups)
    layers = (layer for spec in specs for layer in getattr(spec, "kv_cache_specs", {"": spec}).values())
    return any(getattr(layer, "non_causal", False) for layer in layers)


def _count_backoff(vllm_config: Any, has_state: bool) -> int:
    """One token for states, which are stepped and not recomputed; with multi-module MTP all but one of the drafter's lookahead, whose
    cache would hold unverified drafts (vLLM 0.32.0, `nixl/base_scheduler.py`, `_prefill_backoff`).
    """
    return max(int(has_state), release().num_lookahead_tokens(vllm_config) - 1)


def read_prompt(request: Request, config: EngineConfig) -> Prompt:
    """All tokens of a request so far, and what they do not show. vLLM puts zeros where a prompt was given as embeddings."""
    return Prompt(
        request.all_token_ids,
        read_items(request.mm_features, config.positions),
        config.adapters.identify(request.lora_request),
        digest_embeds(request),
        request.cache_salt or "",
    )


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


def count_settled(request: Request) -> int:
    """Tokens of a finished request whose cache has been written.

    vLLM also counts tokens of a step that is still under way, where that step began before the end was known, and accepted drafts
    behind the end.
    """
    return int(min(request.num_computed_tokens - request.num_in_flight_tokens, len(request.all_token_ids)))


def refuse(request: Request, reason: str) -> None:
    """End a request that waits and holds no blocks, in the scheduler's next step. Its client gets an error, the log the reason.

    A connector of vLLM 0.32 can only report how many tokens it has; vLLM computes the rest. A failed load does not help: with
    `kv_load_failure_policy=recompute` vLLM computes the prompt. Whatever the policy, vLLM ends a request whose grammar could not be
    compiled (0.32.0, `Scheduler.grammar_compile_error_reqs`). So this hands the scheduler such a request.

    vLLM begins with one that must not read its prefix cache whatever a connector says of its tokens, unless that is taken back.
    """
    logger.error(
        "request %s is refused: %s",
        *(request.request_id, reason),
        extra=fields("request_refused", request_id=request.request_id),
    )
    request.structured_output_request = StructuredOutputRequest(
        StructuredOutputsParams(json_object=True), RequestRefused(reason)
    )
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    request.skip_reading_prefix_cache = False
