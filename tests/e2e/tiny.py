"""What is a tiny model, and what do all of them share?"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

VOCABULARY = 512
# The token that stands for a part of a picture, in models that see.
PICTURE_TOKEN = 300
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
    model is started with. `draft`: what speculates for it, see `tests.e2e.drafts`. `picture_tokens`: how many a picture has;
    0 for a model that sees none. Of one that does, `config` is all of it.
    """

    name: str
    architecture: str
    config: Mapping[str, Any]
    dtype: str = "float32"
    seed: int = 7
    prefix_caching: bool = True
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    draft: str | None = None
    picture_tokens: int = 0

    @property
    def digest(self) -> str:
        """Twelve hex digits that change whenever the files would."""
        text = json.dumps([asdict(self), BASE, VOCABULARY, FORM], sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]
