"""Which tiny models speculate for others, and how are they made?

Written tensor by tensor, by the names that vLLM's loaders know, since `transformers` has no classes for them:

- `eagle3`: one layer over three of the target's hidden states, with a cache of its own;
- `mtp`: a predicting layer inside the target's own checkpoint, after its last layer;
- `mtp-beside`: one beside the target's layers there, which predicts two tokens (Qwen3-Next).

A draft of another kind than its target (a latent beside keys and values) does not start on the CPU build, see
`tests/vllm/test_over_nixl.py`.

Random drafts are hardly ever right, which is what the tests want: every verification step rejects something.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

EAGLE_LAYERS = [1, 2, 3]
SPECULATED = 2
SEED = 11


def speculative_config(draft: str, folder: Path) -> dict[str, Any]:
    """What an engine is told; `folder` is the target's."""
    if draft == "mtp":
        return {"method": "mtp", "num_speculative_tokens": 1}
    if draft == "mtp-beside":
        return {"method": "mtp", "num_speculative_tokens": SPECULATED}
    return {"method": "eagle3", "model": str(folder / draft), "num_speculative_tokens": SPECULATED}


def add_draft(draft: str, folder: Path) -> None:
    """Write `draft` into the folder of its target, which is complete otherwise."""
    {"mtp": _add_predictor, "mtp-beside": _add_predictor, "eagle3": _add_eagle}[draft](draft, folder)


def _drawing() -> Callable[..., Any]:
    import torch

    generator = torch.Generator().manual_seed(SEED)
    return lambda *shape: torch.randn(*shape, generator=generator) * 0.1


def _add_eagle(draft: str, folder: Path) -> None:
    import torch
    from safetensors.torch import save_file

    target = json.loads((folder / "config.json").read_text())
    hidden, wide, words = target["hidden_size"], target["intermediate_size"], target["vocab_size"]
    draw = _drawing()
    weights = {
        **{f"midlayer.{name}.weight": torch.ones(hidden) for name in ("input_layernorm", "hidden_norm")},
        "midlayer.post_attention_layernorm.weight": torch.ones(hidden),
        **{f"midlayer.mlp.{name}_proj.weight": draw(wide, hidden) for name in ("gate", "up")},
        "midlayer.mlp.down_proj.weight": draw(hidden, wide),
        "fc.weight": draw(hidden, len(EAGLE_LAYERS) * hidden),
        "norm.weight": torch.ones(hidden),
        "lm_head.weight": draw(words, hidden),
    }
    config, attention = _grouped(hidden, draw)
    weights.update((f"midlayer.self_attn.{name}.weight", tensor) for name, tensor in attention.items())
    kept = ("hidden_size", "intermediate_size", "vocab_size", "max_position_embeddings", "bos_token_id", "eos_token_id")
    config |= {key: target[key] for key in kept}
    config |= {
        "num_hidden_layers": 1,
        "draft_vocab_size": words,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
        "tie_word_embeddings": False,
        "eagle_aux_hidden_state_layer_ids": EAGLE_LAYERS,
    }
    (folder / draft).mkdir()
    (folder / draft / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / draft / "model.safetensors", metadata={"format": "pt"})


def _grouped(hidden: int, draw: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    heads, kv_heads, width = 8, 4, 64
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return config, {
        "q_proj": draw(heads * width, 2 * hidden),
        "k_proj": draw(kv_heads * width, 2 * hidden),
        "v_proj": draw(kv_heads * width, 2 * hidden),
        "o_proj": draw(hidden, heads * width),
    }


def _add_predictor(draft: str, folder: Path) -> None:
    """A layer like the target's last one, and what feeds it."""
    import torch
    from safetensors.torch import load_file, save_file

    config = json.loads((folder / "config.json").read_text())
    number, hidden, draw = config["num_hidden_layers"], config["hidden_size"], _drawing()
    weights = load_file(folder / "model.safetensors")
    is_beside = draft == "mtp-beside"
    last, own = f"model.layers.{number - 1}.", "mtp.layers.0." if is_beside else f"model.layers.{number}."
    layer = {name.replace(last, own): tensor for name, tensor in weights.items() if name.startswith(last)}
    for name, tensor in layer.items():
        weights[name] = draw(*tensor.shape).to(tensor.dtype) if tensor.ndim > 1 else tensor.clone()
    joins = draw(hidden, 2 * hidden).to(weights["lm_head.weight"].dtype)
    if is_beside:
        norms = ("norm", "pre_fc_norm_hidden", "pre_fc_norm_embedding")
        weights |= {
            "mtp.fc.weight": joins,
            **{f"mtp.{name}.weight": torch.zeros(hidden, dtype=joins.dtype) for name in norms},
        }
    else:
        weights |= {
            f"{own}embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
            f"{own}shared_head.head.weight": weights["lm_head.weight"].clone(),
            f"{own}eh_proj.weight": joins,
            **{f"{own}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")},
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config["num_nextn_predict_layers"] = 1
    (folder / "config.json").write_text(json.dumps(config, indent=2))
