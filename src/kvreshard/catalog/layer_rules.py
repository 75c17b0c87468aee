"""Rules that give each decoder layer its caches, which rows of `families` name in `layers` and `predicts`.

A rule gives a text per layer: the words of its caches in the order in which vLLM registers them, `""` for a layer without any. General
rules come first, then those of one family each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvreshard.catalog.config import Config
from kvreshard.catalog.family import LayerRule, PredictionRule

LAYER_TYPES: Mapping[str, str] = {"full_attention": "full", "sliding_attention": "window"}
STATE_TYPES: Mapping[str, str] = {"linear_attention": "state", "full_attention": "full"}
BLOCKS: Mapping[str, str] = {
    "mamba": "state", "linear_attention": "state", "attention": "full", "full_attention": "full", "mlp": "", "moe": "",
}  # fmt: skip
LETTERS: Mapping[str, str] = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}
INDEXER_TYPES: Mapping[str, str] = {"full": "full", "shared": "shared"}
# What `use_sliding_window` means to a family's class: nothing; no window unless it is true; no window if it is false.
IGNORED, OFF, ON = "ignored", "off", "on"


def uniform(words: str) -> LayerRule:
    """All layers have the same caches."""
    return lambda _config, num_layers: [words] * num_layers


def every(period: int | str, default: int | None = None, *, others: str, last: str = "full") -> LayerRule:
    """The last of every `period` layers differs from the others. `period`: a number, or the field that has it."""

    def rule(config: Config, num_layers: int) -> list[str]:
        number = period if isinstance(period, int) else config.count(period, default)
        return [others if (index + 1) % number else last for index in range(num_layers)]

    return rule


def listed(words: Mapping[str, str], otherwise: LayerRule | None = None, *, field: str = "layer_types") -> LayerRule:
    """The file lists the type of every layer in `field`. Without the field the rule `otherwise` decides, if there is one."""

    def rule(config: Config, num_layers: int) -> Sequence[str]:
        if otherwise is not None and not config.has(field):
            return otherwise(config, num_layers)
        return config.entries(field, num_layers, words)

    return rule


def decided(rule: LayerRule, words: Mapping[str, str], why: str) -> LayerRule:
    """`rule` decides, since vLLM's class does not look at `layer_types`; a file whose types contradict it is refused. `why`: what they contradict."""

    def checked(config: Config, num_layers: int) -> Sequence[str]:
        types = tuple(rule(config, num_layers))
        if config.has("layer_types") and tuple(config.entries("layer_types", num_layers, words)) != types:
            raise config.error("layer_types", f"contradicts {why}", "make them agree in a copy of the file")
        return types

    return checked


def numbered(field: str, word: Callable[[int], str], *, null: int | None = None) -> LayerRule:
    """The file lists a number for every layer in `field`; `word` gives the caches for a number. `null`: stands for null."""
    return lambda config, num_layers: [word(entry) for entry in config.numbers(field, num_layers, null=null)]


def sharing(rule: LayerRule) -> LayerRule:
    """The last `num_kv_shared_layers` read the cache of an earlier layer and have none (vLLM 0.32 `gemma4.py`)."""

    def shared(config: Config, num_layers: int) -> Sequence[str]:
        layers, number = rule(config, num_layers), config.count("num_kv_shared_layers", at_least=0)
        if number >= num_layers:
            raise config.error("num_kv_shared_layers", f"is {number} of {num_layers} layers", "one layer needs a cache")
        return [*layers[: num_layers - number], *[""] * number]

    return shared


@dataclass(frozen=True, slots=True)
class Windows:
    """Layers of plain attention, full or with the window of `sliding_window`, as most families have them.

    `by_type`: the class in vLLM 0.32 looks at `layer_types`; if not, a window that some layers lack is dropped for all. `for_all`: without
    types all layers have the window (`engine/arg_utils.py:2249`). `switch`: what `use_sliding_window` means. `first`: where the file has no
    `max_window_layers`, the first layer with a window; None if the class does not read it.
    """

    by_type: bool = True
    for_all: bool = True
    switch: str = IGNORED
    first: int | None = None

    def __call__(self, config: Config, num_layers: int) -> Sequence[str]:
        none = ["full"] * num_layers
        is_on = config.flag("use_sliding_window", self.switch != OFF)
        if self.switch == OFF and not is_on:
            return none
        if config.has("layer_types"):
            types = config.entries("layer_types", num_layers, LAYER_TYPES)
            return types if self.by_type or "full" not in types else none
        if not config.has("sliding_window") or not self.for_all or (self.switch == ON and not is_on):
            return none
        first = 0 if self.first is None else config.count("max_window_layers", self.first, at_least=0)
        return ["window" if index >= first else "full" for index in range(num_layers)]


ALTERNATING = listed(LAYER_TYPES, every(2, others="window"))
# vLLM 0.32 has classes that give no layer a window of its own: all have one, or, where `layer_types` differ, none.
BY_TYPE, ALL_OR_NONE, SWITCHED = Windows(), Windows(by_type=False), Windows(switch=OFF, first=28)


def num_predicting(config: Config) -> int:
    """Layers that predict, by the field that most files have for it."""
    return config.count("num_nextn_predict_layers", 0, at_least=0)


def mtp(words: str, field: str = "num_nextn_predict_layers", default: int = 0) -> PredictionRule:
    """As many layers that predict as `field` says, all with the same caches."""
    return lambda config, _layers: [words] * config.count(field, default, at_least=0)


def one(words: str) -> PredictionRule:
    """One layer predicts, whatever the file has."""
    return lambda _config, _layers: [words]


def mtp_like_first(config: Config, layers: Sequence[str]) -> Sequence[str]:
    """Layers that predict are like the model's first ones."""
    return [layers[index % len(layers)] for index in range(num_predicting(config))]


def mtp_behind(config: Config, layers: Sequence[str]) -> Sequence[str]:
    """Layers that predict are listed behind the others."""
    return layers[config.count("num_hidden_layers") :]


def sparse_types(words: str) -> Mapping[str, str]:
    """Types of models whose attention has an indexer beside delta states; `words`: the caches of such attention."""
    return {
        **dict.fromkeys(("full_attention", "indexed_attention", "qwen_sparse_attention"), words), "linear_attention": "state",
    }  # fmt: skip


def smollm3(config: Config, num_layers: int) -> Sequence[str]:
    """Windows by type only. Layers without rotary embedding have the same caches as the others."""
    if config.has("layer_types"):
        return Windows(switch=ON)(config, num_layers)
    config.must_be("use_sliding_window", False)
    return ["full"] * num_layers


def exaone4(config: Config, num_layers: int) -> Sequence[str]:
    """Without a window all layers are full."""
    if not config.has("sliding_window") and not config.has("layer_types"):
        return ["full"] * num_layers
    return listed(LAYER_TYPES, every("sliding_window_pattern", 4, others="window"))(config, num_layers)


def cohere2_moe(config: Config, num_layers: int) -> Sequence[str]:
    """The first `first_k_dense_replace` layers have a period of their own, by default of full layers only."""
    name = "first_k_dense_replace"
    first = config.count(name, 0, at_least=0)
    if first > num_layers:
        raise config.error(name, f"is {first} of {num_layers} layers", "give at most as many")
    inner = every("prefix_dense_sliding_window_pattern", 1, others="window")(config, first) if first else ()
    return [*inner, *every("sliding_window_pattern", 4, others="window")(config, num_layers - first)]


def muse_glimmer(config: Config, num_layers: int) -> Sequence[str]:
    """vLLM reads `no_rope_layers`, by default 1 in all but every fourth layer from the last."""
    rotated = [(num_layers - 1 - index) % 4 != 0 for index in range(num_layers)]
    if config.has("no_rope_layers"):
        rotated = [entry == 1 for entry in config.numbers("no_rope_layers", num_layers)]
    return ["window" if entry else "full" for entry in rotated]


def gpt_oss(config: Config, num_layers: int) -> Sequence[str]:
    """vLLM gives every other layer the window, from the first on, and all layers where the file says so of all."""
    if config.has("layer_types") and set(config.entries("layer_types", num_layers, LAYER_TYPES)) == {"window"}:
        return ["window"] * num_layers
    return every(2, others="window")(config, num_layers)


def llama4(config: Config, num_layers: int) -> Sequence[str]:
    """Layers with rotary embedding attend within a chunk, by default all but every fourth; the others to everything."""
    if config.fields.get("no_rope_layers"):  # an empty list stands for the default
        return numbered("no_rope_layers", lambda entry: "chunk" if entry else "full")(config, num_layers)
    return every("no_rope_layer_interval", 4, others="chunk")(config, num_layers)


def minimax_m2(config: Config, num_layers: int) -> Sequence[str]:
    """Attention in all layers. The older MiniMax types, with linear attention, are not described."""
    if config.has("attn_type_list"):
        for index, entry in enumerate(config.numbers("attn_type_list", num_layers)):
            if entry != 1:
                raise config.error(f"attn_type_list[{index}]", f"is {entry}", "only 1, full attention, is known")
    return ["full"] * num_layers


def gemma4(config: Config, num_layers: int) -> Sequence[str]:
    """Types as listed, the last one full."""
    types = config.entries("layer_types", num_layers, LAYER_TYPES)
    if types[-1] != "full":
        raise config.error(
            f"layer_types[{num_layers - 1}]", "is a sliding layer", "transformers makes the last layer a full one"
        )
    return types


def nas(config: Config, num_layers: int) -> Sequence[str]:
    """Layers found by a search: each with KV heads of its own, or without attention."""
    blocks = config.fields.get("block_configs")
    if not isinstance(blocks, Sequence) or len(blocks) != num_layers:
        raise config.error("block_configs", "is no list with an entry per layer", f"list {num_layers} blocks")
    found = [config.element("block_configs", index).part("attention") for index in range(num_layers)]
    return ["" if one.flag("no_op", False) or one.fields.get("replace_with_linear") else "full" for one in found]


def inkling(config: Config, num_layers: int) -> Sequence[str]:
    """Windows in `local_layer_ids`; each layer also keeps the inputs of its convolutions."""
    local = config.positions("local_layer_ids", num_layers, first=0, needed=False)
    return ["window_inputs window" if index in local else "inputs full" for index in range(num_layers)]


def step3p5(config: Config, num_layers: int) -> Sequence[str]:
    """`layer_types` includes the layers that predict. Layers of the type in `attention_other_setting` have its heads."""
    number = num_predicting(config)
    types = config.entries("layer_types", num_layers + number, LAYER_TYPES)
    other = config.part("attention_other_setting")
    special = LAYER_TYPES.get(other.text("attention_type")) if other.fields else None
    return [f"other_{entry}" if entry == special else entry for entry in types]


def deepseek(config: Config, num_layers: int) -> Sequence[str]:
    """Latents; K and V where both parts of a latent head are empty (DeepSeek-OCR)."""
    is_plain = all(config.fields.get(name) == 0 for name in ("qk_nope_head_dim", "qk_rope_head_dim"))
    return ["full" if is_plain else "latent"] * num_layers


def sparse(config: Config, num_layers: int) -> Sequence[str]:
    """Layers that use the choice of an earlier indexer have none. vLLM ignores `indexer_types`, so these must agree with what it reads."""
    is_shared = _scheduled(config, num_layers)
    if config.has("indexer_types"):
        types = config.entries("indexer_types", num_layers, INDEXER_TYPES)
        for index, (word, shared) in enumerate(zip(types, is_shared, strict=True)):
            if (word == "shared") != shared:
                is_listed = config.has("index_topk_pattern")
                by = "index_topk_pattern" if is_listed else "index_topk_freq and index_skip_topk_offset"
                raise config.error(
                    f"indexer_types[{index}]",
                    f"is '{word}', but by {by}, which vLLM reads, the layer is '{'shared' if shared else 'full'}'",
                    "make them agree in a copy of the file",
                )
    return ["latent" if shared else "indexer latent" for shared in is_shared]


def _scheduled(config: Config, num_layers: int) -> list[bool]:
    """`S` in a pattern of letters, or all but every `index_topk_freq`th (vLLM 0.32 `deepseek_v32/attention.py:166`)."""
    if config.has("index_topk_pattern"):
        pattern = config.text("index_topk_pattern")
        return [pattern[index : index + 1] == "S" for index in range(num_layers)]
    period, first = config.count("index_topk_freq", 1), config.count("index_skip_topk_offset", 2, at_least=0)
    return [max(index - first + 1, 0) % period != 0 for index in range(num_layers)]


def hy_v4(config: Config, num_layers: int) -> Sequence[str]:
    """A file without `layer_types` has no indexer; without `indexer_types` the first and every fourth behind it has one (`HYV4Config`)."""
    choosing = ("sparse_attention", "sparse", "indexed_attention", "deepseek_sparse_attention")
    types = listed({**dict.fromkeys(choosing, "sparse"), "full_attention": "full"}, uniform("full"))(config, num_layers)
    shared = ["full" if index == 0 or (index - 1) % 4 == 0 else "shared" for index in range(num_layers)]
    if config.has("indexer_types"):
        shared = [*config.entries("indexer_types", num_layers, INDEXER_TYPES)]
    return [
        "latent" if entry == "full" or choice == "shared" else "indexer latent"
        for entry, choice in zip(types, shared, strict=True)
    ]


def minimax_m3(config: Config, num_layers: int) -> Sequence[str]:
    """Layers of `sparse_attention_freq` that are not 0 have an indexer; transformers writes `layer_types` instead."""
    inner = config.part("sparse_attention_config")
    if inner.has("sparse_attention_freq"):
        return numbered("sparse_attention_freq", lambda entry: "indexer full" if entry else "full")(inner, num_layers)
    return config.entries("layer_types", num_layers, {"minimax_m3_sparse": "indexer full", "full_attention": "full"})


def qwen4_exp(config: Config, num_layers: int) -> Sequence[str]:
    """Delta states and attention, with an indexer if the file has its heads. Layers of `ple_layer_ids`, counted from 1, also have a convolution."""
    attention = _qwen4_attention(config)
    otherwise = every("full_attention_interval", 4, others="state", last=attention)
    words = listed(sparse_types(attention), otherwise)(config, num_layers)
    positions = config.positions("ple_layer_ids", num_layers, needed=False)
    return [f"ple {word}" if index + 1 in positions else word for index, word in enumerate(words)]


def jamba(config: Config, num_layers: int) -> Sequence[str]:
    """Attention where the layer's number leaves `attn_layer_offset` when divided by `attn_layer_period`."""
    period, offset = config.count("attn_layer_period"), config.count("attn_layer_offset", at_least=0)
    if offset >= period:
        raise config.error("attn_layer_offset", f"is {offset}", f"it must be below attn_layer_period {period}")
    return ["full" if index % period == offset else "state" for index in range(num_layers)]


def kimi_linear(config: Config, num_layers: int) -> Sequence[str]:
    """Every layer is in one of two lists, which count from 1."""
    inner = config.part("linear_attn_config")
    states, latents = inner.positions("kda_layers", num_layers), inner.positions("full_attn_layers", num_layers)
    if sorted((*states, *latents)) != list(range(1, num_layers + 1)):
        raise inner.error(
            "kda_layers",
            f"and full_attn_layers name {len(states)} and {len(latents)} of {num_layers} layers",
            "name each once",
        )
    return ["state" if index + 1 in states else "latent" for index in range(num_layers)]


def bailing(config: Config, num_layers: int) -> Sequence[str]:
    """Latents last of every `layer_group_size` layers; with `short_conv_kernel_size` (Ling 3), also those after the last whole group."""
    group = config.count("layer_group_size", 1)
    is_delta = config.has("short_conv_kernel_size")
    num_grouped = num_layers // group * group if is_delta else num_layers
    state = "delta" if is_delta else "linear"
    return [state if (index + 1) % group and index < num_grouped else "latent" for index in range(num_layers)]


def lfm2(config: Config, num_layers: int) -> Sequence[str]:
    """Attention in `full_attn_idxs`."""
    full = config.positions("full_attn_idxs", num_layers, first=0)
    return ["full" if index in full else "state" for index in range(num_layers)]


def mtp_like_last(config: Config, layers: Sequence[str]) -> Sequence[str]:
    """HY-V4: like the last layer, with an indexer of their own."""
    types = config.fields.get("layer_types")
    words = "latent" if types is None or types[-1] == "full_attention" else "indexer latent"
    return [words] * config.count("num_nextn_predict_layers", 1, at_least=0)


def mtp_inkling(config: Config, _layers: Sequence[str]) -> Sequence[str]:
    """Inkling: like the model's layers, by a list of their own."""
    return inkling(config.part("mtp_config"), num_predicting(config))


def mtp_nemotron(config: Config, _layers: Sequence[str]) -> Sequence[str]:
    """Nemotron-H: the attention layers of one prediction block, once per block."""
    blocks = num_predicting(config)
    if not blocks:
        return ()
    listing = with_pattern(config, "mtp_hybrid_override_pattern", "mtp_layers_block_type")
    listed_types = listing.fields.get("mtp_layers_block_type")
    length = len(listed_types) if isinstance(listed_types, Sequence) else 1
    types = listing.entries("mtp_layers_block_type", length, BLOCKS)
    if "state" in types:
        raise config.error("mtp_layers_block_type", "has a Mamba layer", "predicting states are not described")
    return ["full"] * (blocks * types.count("full"))


def mtp_qwen4_exp(config: Config, _layers: Sequence[str]) -> Sequence[str]:
    """Qwen4-Exp: attention, with an indexer if the model's attention has one."""
    return [_qwen4_attention(config)] * config.count("mtp_num_hidden_layers", 1, at_least=0)


def _qwen4_attention(config: Config) -> str:
    return "open_keys indexer full" if config.has("indexer_n_heads") else "full"


def with_pattern(config: Config, pattern: str, field: str) -> Config:
    """The config with the list of block types that a pattern of letters abbreviates."""
    if config.has(field) or not config.has(pattern):
        return config
    letters = config.text(pattern)
    for position, letter in enumerate(letters):
        if letter not in LETTERS:
            raise config.error(
                f"{pattern}[{position}]", f"is {letter!r}", f"known here are {', '.join(map(repr, LETTERS))}"
            )
    return config.with_fields(**{field: [LETTERS[letter] for letter in letters]})
