"""Fields that a family's class computes from others: what rows of `families` name in `sets`, `prepare` and where a size of a state stands."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvreshard.catalog.config import Config
from kvreshard.catalog.family_layers import with_pattern

# The hidden size of the Falcon file that had the newer architecture before there was a field for that.
NEWER_HIDDEN_SIZE = 8192


def minicpm3_head_size(config: Config) -> int:
    """Channels of K as they come out of the latent."""
    return config.count("qk_nope_head_dim") + config.count("qk_rope_head_dim")


def deepseek_head_size(config: Config) -> int:
    """As wide as vLLM's `DeepseekAttention` has it, which does not look at `head_dim`."""
    return config.count("hidden_size") // config.count("num_attention_heads")


def falcon_kv_heads(config: Config) -> int:
    """`num_kv_heads` in the newer architecture, else one, or one per query head. The oldest files do not say which architecture they have."""
    is_newer = config.flag("new_decoder_architecture", False)
    if config.model_type != "falcon":
        is_newer = is_newer or config.count("hidden_size") == NEWER_HIDDEN_SIZE
    num_heads = config.count("num_attention_heads")
    shared = 1 if config.flag("multi_query", True) else num_heads
    return config.count("num_kv_heads", num_heads) if is_newer else shared


def bigcode_kv_heads(config: Config) -> int:
    """All query heads share one K and V unless `multi_query` is false."""
    return 1 if config.flag("multi_query", True) else config.count("num_attention_heads")


def chatglm_kv_heads(config: Config) -> int:
    """Groups of query heads share K and V if `multi_query_attention` says so."""
    is_shared = config.flag("multi_query_attention", False)
    return config.count("multi_query_group_num" if is_shared else "num_attention_heads")


def step1_kv_heads(config: Config) -> int:
    """One per group of query heads. For vLLM a name that is there decides even if it says null."""
    return config.count("num_attention_groups" if "num_attention_groups" in config.fields else "num_key_value_heads", 1)


def zamba2_head_size(config: Config) -> int:
    """Attention over the hidden states and the embeddings."""
    default = 2 * config.count("hidden_size") // config.count("num_attention_heads")
    return config.count("attention_head_dim", default)


def zamba2_ssm_head_size(config: Config) -> int:
    """`mamba_headdim`, else the inner size over the heads."""
    inner = config.count("mamba_expand") * config.count("hidden_size")
    return config.count("mamba_headdim", inner // config.count("n_mamba_heads"))


def hidden_times(factor: str, *, unless: str | None = None) -> Callable[[Config], int]:
    """The inner size of a state: what the field `unless` says, else the hidden size times a factor."""

    def size(config: Config) -> int:
        if unless is not None and config.has(unless):
            return config.count(unless)
        return config.count(factor) * config.count("hidden_size")

    return size


def ssm_head_size(inner_size: Callable[[Config], int]) -> Callable[[Config], int]:
    """`mamba_d_head`; `auto` is the inner size over the heads, and any other must agree with it."""

    def size(config: Config) -> int:
        inner, heads = inner_size(config), config.count("mamba_n_heads")
        width = inner // heads if config.fields.get("mamba_d_head") == "auto" else config.count("mamba_d_head")
        if heads * width != inner:
            raise config.error(
                "mamba_d_head",
                f"is {width} for {heads} heads, but the inner size is {inner}",
                "their product must be it",
            )
        return width

    return size


def nemotron_blocks(config: Config) -> Config:
    """Layers of one block each, as many as are listed. Older files have the width as `attention_head_dim` too, which transformers does not read."""
    filled = with_pattern(config, "hybrid_override_pattern", "layers_block_type")
    blocks = filled.fields.get("layers_block_type")
    number = len(blocks) if isinstance(blocks, Sequence) and not isinstance(blocks, str) else 0
    config.must_be("attention_head_dim", config.head_size())
    return filled.with_fields(num_hidden_layers=config.count("num_hidden_layers", number or None))


def refuse_listening(config: Config) -> Config:
    """Voxtral's encoder of sound attends to what it has heard before, which the text part does not tell."""
    raise config.error(
        "model_type",
        f"is '{config.model_type}', whose encoder of sound keeps caches beside the language model's",
        "these are not described; ask an engine that runs for its layout (`kvreshard doctor --peer`)",
    )
