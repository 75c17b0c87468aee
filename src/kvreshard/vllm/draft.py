"""Which layers belong to a draft, and which model's configuration speaks for them?

Drafts are registered beside the target's layers, on the last pipeline stage only. vLLM's newer runner marks them
(`is_draft_layer`, `v1/worker/gpu/spec_decode/speculator.py:237`); the older one does not, so names decide too:

| draft | name (vLLM 0.32) |
|---|---|
| Eagle, Eagle-3, DeepSeek MTP | `model.layers.<n + i>...`, with n layers of the target (`llama_eagle3.py:202`) |
| Qwen3-Next and MiMo-V2 MTP | `mtp.layers.<i>...`, `model.mtp.layers.<i>...` |
| standalone draft model | `draft_model....` |

A draft that shares the target's cache (Gemma-4 MTP) has none of its own.
"""

from __future__ import annotations

from typing import Any

from kvreshard.kinds import Place
from kvreshard.vllm.rank_place import RankPlace

DRAFT_PARTS = ("mtp", "draft_model")
# Ways to guess tokens that look at texts only (`config/speculative.py`).
WITHOUT_MODEL = ("ngram", "ngram_gpu", "suffix")


def layer_index(name: str) -> int | None:
    """The first number among the parts of a layer's name.

    >>> layer_index("model.layers.12.self_attn.attn"), layer_index("mtp.fc")
    (12, None)
    """
    return next((int(part) for part in name.split(".") if part.isdigit()), None)


def is_draft(name: str, num_target_layers: int | None, marked: bool) -> bool:
    """Whether the layer belongs to a draft. `num_target_layers`: None where the target's config does not say."""
    index = layer_index(name)
    beyond = num_target_layers is not None and index is not None and index >= num_target_layers
    return marked or any(part in DRAFT_PARTS for part in name.split(".")) or beyond


def num_target_layers(vllm_config: Any) -> int | None:
    """Decoder layers of the target; None without a draft, when every layer is the target's."""
    if getattr(vllm_config, "speculative_config", None) is None:
        return None
    text = getattr(vllm_config.model_config, "hf_text_config", None)
    count = getattr(text, "num_hidden_layers", None)
    return int(count) if isinstance(count, int) else None


def has_draft(vllm_config: Any) -> bool:
    """Whether a model drafts tokens, and so may write a cache."""
    speculative = vllm_config.speculative_config
    return speculative is not None and speculative.method not in WITHOUT_MODEL


def draft_place(vllm_config: Any, place: RankPlace) -> Place:
    """The place of a draft's caches: a draft with a tensor-parallel size of 1 is whole on every rank.

    Drafts keep the whole sequence where DCP does not shard them (`gpu/model_runner.py:595`).
    """
    parallel = getattr(getattr(vllm_config, "speculative_config", None), "draft_parallel_config", None)
    tp_size = int(getattr(parallel, "tensor_parallel_size", place.tp_size))
    return Place() if tp_size == 1 else place.whole_sequence()
