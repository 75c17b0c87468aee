"""The configuration of vLLM that every simulated engine's is a copy of."""

from __future__ import annotations

import functools
import json
import tempfile
import warnings
from pathlib import Path
from typing import Any

# Tokens of a prompt, and of an answer.
LONGEST = 150
MOST_SAID = 24
# The longest prompt of a world, one token more for a prompt that differs, and all that is said (`world`).
MAX_MODEL_LEN = LONGEST + 1 + MOST_SAID
# Never loaded: a scheduler wants a model's configuration, and looks at little of it.
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 4096,
    "torch_dtype": "float32",
}


@functools.cache
def base_config() -> Any:
    """Once per process: it takes seconds."""
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (Path(folder) / "config.json").write_text(json.dumps(MODEL))
        return VllmConfig(
            model_config=ModelConfig(
                model=folder, skip_tokenizer_init=True, dtype="float32", max_model_len=MAX_MODEL_LEN
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=8, max_num_batched_tokens=512, max_model_len=MAX_MODEL_LEN, enable_chunked_prefill=True,
                async_scheduling=False, is_encoder_decoder=False,
            ),
            cache_config=CacheConfig(block_size=16, enable_prefix_caching=True),
        )  # fmt: skip
