"""A model's caches, layer by layer, before any engine has chosen sizes.

A `Model` lists its caches in the order in which vLLM 0.32 registers them, because grouping and the order of tensors in a page follow it. A
`ModelLayer` is one cache: a decoder layer may have several (attention and a state, a latent and its indexer).

`family` is what the block table of a cache keeps, and names its group:

| family | pages keep |
|---|---|
| `full` | K and V of all tokens |
| `window` | the last tokens |
| `chunk` | the tokens of the last chunk, which begins at a multiple of its size (Llama-4) |
| `latent` | compressed vectors of all tokens |
| `compressor` | the last tokens, not yet compressed (DeepSeek-V4) |
| `ring` | the same, in one page per request (DeepSeek-V4.1, GLM-5-Next, Qwen4-Exp) |
| `state` | one state |

The engine chooses the dtype of a cache. So a layer has its own kind (`auto`: the model's dtype, or the one that its file declares) and one
for each other dtype that it can store. Refused: a dtype that no layer of the model can store.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from kvreshard.kinds import Attention, Kind, Latent
from kvreshard.model import LayoutError

FAMILIES = ("full", "window", "chunk", "latent", "compressor", "ring", "state")
NATIVE = "auto"
PACKED = "fp8_ds_mla"
# DeepSeek-V4.1's latents in four bits, and as GPUs before SM100 have them, which vLLM calls `fp8_ds_mla` too.
PACKED_FP4, PACKED_V4 = "nvfp4_ds_mla", "fp8_ds_mla_v4"
CACHE_DTYPES = ("bfloat16", "float16", "float32", "fp8_e4m3", "fp8_e5m2")
# vLLM 0.32: an fp8 cache has one scale per tensor, a parameter of the layer that lies outside of the cache.
PER_TENSOR = "scale-per-tensor"
NO_KINDS: Mapping[str, Kind] = {}


@dataclass(frozen=True, slots=True)
class ModelLayer:
    """One cache of decoder layer `index`. Drafts are `optional` and lie on the last pipeline stage.

    `predicts`: a prediction layer of the model itself (MTP), which exists only if the engine speculates at least `min_drafts` tokens.
    `page_tokens`: tokens of a page, where the model and not the engine sets them.
    `ignores_fp8`: vLLM's class makes the layer without the engine's cache dtype, so `fp8` changes nothing.
    `undecided`: why the file alone does not give `kind`; the error where the engine has no dtype.
    """

    name: str
    index: int
    kind: Kind
    family: str
    kinds: Mapping[str, Kind] = field(default_factory=dict)
    optional: bool = False
    predicts: bool = False
    min_drafts: int = 1
    page_tokens: int | None = None
    undecided: str = ""
    ignores_fp8: bool = False

    def kind_for(self, dtype: str) -> Kind:
        """The kind in a cache of `dtype`; a layer that cannot store it keeps its own. Raises LayoutError if that is undecided."""
        is_stored = dtype in self.kinds and not (self.ignores_fp8 and dtype.startswith("fp8"))
        if not is_stored and self.undecided:
            raise LayoutError(self.undecided)
        return self.kinds[dtype] if is_stored else self.kind

    def in_dtype(self, dtype: str) -> ModelLayer:
        """The same with a cache of `dtype` by default, if it can store that."""
        return replace(self, kind=self.kinds[dtype], undecided="") if dtype in self.kinds else self


@dataclass(frozen=True, slots=True)
class Model:
    """A model's caches. `num_layers`: decoder layers, with and without caches; pipeline stages are cut from them.

    `dtype`: in which vLLM runs the model, `auto` if the file has none; `cast_from`: the dtype of the file, where vLLM runs another;
    `declared`: the dtype of the caches, where the file declares one. `doubts`: contradictions in the file. `shared_from`: the first decoder layer
    whose cache later layers without caches read; None where none does. `reserved`: states that pages have room for beside those of `layers`.
    """

    name: str
    model_type: str
    num_layers: int
    layers: tuple[ModelLayer, ...]
    dtype: str
    default_page: int = 16
    default_order: str = "LBHNC"
    num_query_heads: int | None = None
    declared: str = NATIVE
    cast_from: str = ""
    doubts: tuple[str, ...] = ()
    shared_from: int | None = None
    reserved: tuple[Kind, ...] = ()

    def __post_init__(self) -> None:
        names = [layer.name for layer in self.layers]
        if not names:
            raise LayoutError(f"model '{self.name}': has no layer with a cache")
        if len(set(names)) < len(names):
            name = next(name for name, times in Counter(names).items() if times > 1)
            raise LayoutError(f"model '{self.name}': two caches are named '{name}'; names must be unique")
        for layer in self.layers:
            if not layer.optional and not 0 <= layer.index < self.num_layers:
                raise LayoutError(
                    f"model '{self.name}': cache '{layer.name}' is in decoder layer {layer.index} of {self.num_layers}"
                )

    def check_dtype(self, dtype: str) -> None:
        """Raises LayoutError if no layer can store `dtype`."""
        allowed = sorted({name for layer in self.layers for name in layer.kinds})
        if dtype != NATIVE and dtype not in allowed:
            raise LayoutError(
                f"dtype '{dtype}': model '{self.name}' has no cache of that dtype; use one of "
                f"{', '.join([NATIVE, *allowed])}"
            )


def in_cache_dtypes(
    name: str, index: int, own: Attention | Latent, family: str, more: Mapping[str, Kind] = NO_KINDS
) -> ModelLayer:
    """A layer that stores every dtype of `CACHE_DTYPES`, by default that of `own`; `more`: its kinds in other dtypes."""
    kinds: dict[str, Kind] = {
        dtype: replace(own, dtype=dtype, quantisation=PER_TENSOR if dtype.startswith("fp8") else "")
        for dtype in CACHE_DTYPES
    }
    return ModelLayer(name, index, kinds.get(own.dtype, own), family, {**kinds, **more})


def as_draft(model: Model, draft: Model) -> Model:
    """`model` with the layers of `draft` behind its own: `draft.<i>.<cache>`, optional, on the last stage.

    A draft's own drafts are left out. The cache dtype that the model's file declares holds for the draft too (vLLM has one). Raises
    LayoutError for a model that has a draft.
    """
    if any(layer.optional and not layer.predicts for layer in model.layers):
        raise LayoutError(
            f"model '{model.name}' comes with a draft of its own, and '{draft.name}' is another; leave --draft out"
        )
    added = tuple(
        replace(
            layer.in_dtype(model.declared),
            name=layer.name.replace("layers.", "draft.", 1),
            index=model.num_layers,
            optional=True,
        )
        for layer in draft.layers
        if not layer.optional
    )
    return replace(model, layers=(*model.layers, *added))
