"""Which tiny models do the engines run, and how are they made?

Each has random weights, drawn once from a fixed seed, and lies in a folder named after a digest of its description:

1. a `TinyModel` names a `transformers` class and the arguments of its configuration;
2. `make` builds it, fills every weight, and saves it (float32 unless the family runs in bfloat16 only);
3. beside them lies a tokenizer of single bytes; the tests send token ids, and do without it where they can.

Weights are wider than usual (standard deviation 0.1, not 0.02), so that the most likely token leads by far more than
float32 noise; a corrupted cache then shows in the tokens as well as in the log-probabilities.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.e2e import drafts

VOCABULARY = 512
SPECIAL = ("<pad>", "<s>", "</s>")
FORM = 4  # of the files; raised when what `make` writes changes
WIDTH = 0.1
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# Plain rope is wrong with MLA on vLLM's CPU build, even in one engine; gpt-oss knows no other.
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 2048,
    "initializer_range": WIDTH,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}


@dataclass(frozen=True, slots=True)
class TinyModel:
    """One model: its `transformers` class, what differs from `BASE`, and what an engine needs besides.

    `prefix_caching`: whether vLLM's CPU build runs it with prefix caching. `engine_args`: what every engine on this
    model is started with. `draft`: what speculates for it, see `tests.e2e.drafts`.
    """

    name: str
    architecture: str
    config: Mapping[str, Any]
    dtype: str = "float32"
    seed: int = 7
    prefix_caching: bool = True
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    draft: str | None = None

    @property
    def digest(self) -> str:
        """Twelve hex digits that change whenever the files would."""
        text = json.dumps([asdict(self), BASE, VOCABULARY, FORM], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]


def _layers(pattern: str, names: Mapping[str, str]) -> list[str]:
    return [names[letter] for letter in pattern]


_WINDOW = {"w": "sliding_attention", "f": "full_attention"}
_GEMMA4 = {
    "num_hidden_layers": 6,
    "layer_types": _layers("wwfwwf", _WINDOW),
    "sliding_window": 160,
    "hidden_size_per_layer_input": 0,
    "attention_k_eq_v": True,
    "head_dim": 32,
    "global_head_dim": 64,
    "tie_word_embeddings": True,
    "rope_parameters": {"sliding_attention": ROPE, "full_attention": {**ROPE, "rope_theta": 1000000.0}},
}
_MLA = {
    "num_key_value_heads": 8,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "first_k_dense_replace": 1,
    "n_shared_experts": 1,
    "rope_parameters": YARN,
}

_QWEN3_NEXT: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": _layers("lllf", {"l": "linear_attention", "f": "full_attention"}),
    "num_key_value_heads": 2,
    "head_dim": 128,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "rope_parameters": {**ROPE, "partial_rotary_factor": 0.25},
}

MODELS: dict[str, TinyModel] = {
    model.name: model
    for model in [
        TinyModel("llama", "LlamaForCausalLM", {"head_dim": 64, "rope_parameters": ROPE}),
        TinyModel("qwen3", "Qwen3ForCausalLM", {"head_dim": 64, "num_key_value_heads": 2, "rope_parameters": ROPE}),
        TinyModel(
            "gemma3",
            "Gemma3ForCausalLM",
            {
                "num_hidden_layers": 6,
                "head_dim": 64,
                "layer_types": _layers("wwfwww", _WINDOW),
                "sliding_window": 160,
                "query_pre_attn_scalar": 64,
                "tie_word_embeddings": True,
                "rope_parameters": {"sliding_attention": ROPE, "full_attention": {**ROPE, "rope_theta": 1000000.0}},
            },
        ),
        TinyModel(
            "llama4",
            "Llama4ForCausalLM",
            {
                "num_hidden_layers": 4,  # three look at their chunk, one at all
                "head_dim": 64,
                "attention_chunk_size": 128,
                "no_rope_layer_interval": 4,
                "num_local_experts": 4,
                "num_experts_per_tok": 1,
                "intermediate_size_mlp": 256,
                "interleave_moe_layer_step": 2,
                "attn_temperature_tuning": False,
                "rope_parameters": ROPE,
            },
        ),
        # The geometry of Gemma-4 12B and 26B: window heads twice as many as global ones, and half as wide.
        TinyModel(
            "gemma4", "Gemma4ForCausalLM", {**_GEMMA4, "num_key_value_heads": 4, "num_global_key_value_heads": 2}
        ),
        # That of the 31B: a window token takes twice the bytes of a global one.
        TinyModel(
            "gemma4-wide", "Gemma4ForCausalLM", {**_GEMMA4, "num_key_value_heads": 8, "num_global_key_value_heads": 2}
        ),
        TinyModel(
            "gpt-oss",
            "GptOssForCausalLM",
            {
                "num_hidden_layers": 4,
                "head_dim": 64,
                "layer_types": _layers("wfwf", _WINDOW),
                "sliding_window": 160,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "intermediate_size": 128,
                "rope_parameters": YARN,
            },
        ),
        TinyModel(
            "deepseek-v2",
            "DeepseekV2ForCausalLM",
            {**_MLA, "topk_method": "greedy", "n_group": 1, "topk_group": 1},
            prefix_caching=False,
        ),
        TinyModel(
            "deepseek-v3",
            "DeepseekV3ForCausalLM",
            {
                **_MLA,
                "q_lora_rank": 64,
                "n_group": 2,
                "topk_group": 1,
                "topk_method": "noaux_tc",
                "num_mtp_layers": 0,
                "num_nextn_predict_layers": 0,
            },
            prefix_caching=False,
        ),
        TinyModel(
            "nemotron-h",
            "NemotronHForCausalLM",
            {
                "num_hidden_layers": 4,
                "layers_block_type": _layers("mamf", {"m": "mamba", "a": "attention", "f": "mlp"}),
                "head_dim": 64,
                "ssm_state_size": 32,
                "mamba_num_heads": 8,
                "mamba_head_dim": 64,
                "n_groups": 4,
                "chunk_size": 32,
                "intermediate_size": 128,
            },
            prefix_caching=False,
        ),
        TinyModel(
            "falcon-h1",
            "FalconH1ForCausalLM",
            {
                "head_dim": 64,
                "mamba_d_ssm": 512,
                "mamba_n_heads": 8,
                "mamba_d_head": 64,
                "mamba_n_groups": 4,
                "mamba_d_state": 32,
                "mamba_chunk_size": 32,
                "rope_parameters": ROPE,
            },
            prefix_caching=False,
        ),
        TinyModel(
            "granite-hybrid",
            "GraniteMoeHybridForCausalLM",
            {
                "hidden_size": 256,  # heads of 32, the narrowest that the CPU kernels know
                "num_hidden_layers": 4,
                "layer_types": _layers("mmam", {"m": "mamba", "a": "attention"}),
                "mamba_n_heads": 8,
                "mamba_d_head": 64,
                "mamba_expand": 2,
                "mamba_n_groups": 1,
                "mamba_d_state": 32,
                "mamba_chunk_size": 32,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "intermediate_size": 64,
                "shared_intermediate_size": 128,
                "rope_parameters": ROPE,
                "attention_multiplier": 0.125,
            },
            prefix_caching=False,
        ),
        TinyModel("qwen3-next", "Qwen3NextForCausalLM", _QWEN3_NEXT, dtype="bfloat16", prefix_caching=False),
        TinyModel(
            "qwen3-next-mtp",
            "Qwen3NextForCausalLM",
            _QWEN3_NEXT,
            dtype="bfloat16",
            prefix_caching=False,
            draft="mtp-beside",
        ),
        TinyModel(
            "mixtral",
            "MixtralForCausalLM",
            {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": ROPE},
        ),
        TinyModel(
            "qwen3-moe",
            "Qwen3MoeForCausalLM",
            {
                "head_dim": 64,
                "num_experts": 4,
                "num_experts_per_tok": 2,
                "moe_intermediate_size": 64,
                "norm_topk_prob": True,
                "rope_parameters": ROPE,
            },
        ),
        TinyModel(
            "llama-eagle3",
            "LlamaForCausalLM",
            {"num_hidden_layers": 4, "head_dim": 64, "rope_parameters": ROPE},
            draft="eagle3",
        ),
        TinyModel(
            "deepseek-mtp",
            "DeepseekV3ForCausalLM",
            {
                **_MLA,
                "q_lora_rank": 64,
                "n_group": 2,
                "topk_group": 1,
                "topk_method": "noaux_tc",
                "num_mtp_layers": 0,
                "num_nextn_predict_layers": 0,
            },
            prefix_caching=False,
            draft="mtp",
        ),
    ]
}


def home() -> Path:
    """Where models are kept between runs; `KVRESHARD_E2E_HOME` overrides it."""
    default = Path(tempfile.gettempdir()) / f"kvreshard-e2e-{os.getuid()}"
    return Path(os.environ.get("KVRESHARD_E2E_HOME", default))


def folder(name: str) -> Path:
    """Where model `name` lies, or will lie."""
    return home() / "models" / f"{name}-{MODELS[name].digest}"


def make(name: str) -> Path:
    """Build model `name` unless it is there. Post-condition: its folder is complete, whoever else makes it meanwhile."""
    target, model = folder(name), MODELS[name]
    if target.exists():
        return target
    import torch
    import transformers

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{name}-"))
    architecture = getattr(transformers, model.architecture)
    torch.manual_seed(model.seed)
    built = architecture(architecture.config_class(**{**BASE, **model.config}))
    _fill(built, model.seed)
    built.to(getattr(torch, model.dtype)).save_pretrained(scratch)
    _tokenizer().save_pretrained(scratch)
    if model.draft is not None:
        drafts.add_draft(model.draft, scratch)
    try:
        scratch.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(scratch)
    return target


def _tokenizer() -> Any:
    """A token per byte, for servers and people that want text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{number}>" for number in range(len(words), VOCABULARY)]
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def _fill(built: Any, seed: int) -> None:
    """Give values to what `transformers` leaves at zero or one, or the shapes of the heads would not be told apart.

    Left as they are: norms, and what a state model derives its decay from.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in built.named_parameters():
            kept = tensor.ndim < 2 and not name.endswith("bias")
            if kept or "dt_bias" in name or bool(tensor.std() > 0):
                continue
            tensor.normal_(0.0, WIDTH, generator=generator)
