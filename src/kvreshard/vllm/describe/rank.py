"""Layout of one rank: fields, shards and regions of its caches.

1. Groups are vLLM's transfer groups by index, `g0`, `g1`, ...; they overlay in one pool whose page 0 means "no page".
2. Layers of a group are described one by one, from their own specification (`UniformTypeKVCacheSpecs` is unwrapped), their
   registered tensor and their `LayerInfo`; never from numbers of the whole model alone.
3. A layer that cannot be described exactly becomes an opaque page. A name under which a layer shares another's cache gets no
   field, and neither does a cache without pages (encoder-only attention).
4. The page that the kind expects must be the page of the tensor; then steps and offsets are the tensor's own.

Every storage is one region (`kv`, `kv1`, ...). Refused, with both values: views that contradict the kind, layers without a
tensor, cross attention and attention sinks in shared pages, caches without views (HiSparse).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvreshard.kinds import Kind, Opaque, Piece, Place, Ring, Style
from kvreshard.kinds.assemble import NULL_PAGE, POOL
from kvreshard.model import EngineLayout, Field, Geometry, Group, LayoutError, Rank, Region, Shard
from kvreshard.model.changed import replace
from kvreshard.vllm.describe.layer_info import LayerInfo, read_layer
from kvreshard.vllm.describe.layer_view import LayerView, layer_view, slabs
from kvreshard.vllm.describe.model_config import (
    configured_heads,
    draft_place,
    is_draft,
    num_target_layers,
    total_kv_heads,
)
from kvreshard.vllm.describe.paged import Found, attention_kind, latent_kind, ring_kind, window_tokens
from kvreshard.vllm.describe.place import RankPlace
from kvreshard.vllm.describe.states import state_kind
from kvreshard.vllm.versions import release

REFUSED: Mapping[str, str] = {
    "CrossAttentionSpec": "cross attention caches an encoder's tokens",
    "SinkFullAttentionSpec": "attention sinks are pages that requests share",
    "HiSparseHotSpec": "the cache has no view",
    "HiSparseResidentSpec": "the cache has no view",
}
WITHOUT_PAGES = ("EncoderOnlyAttentionSpec",)


def describe_rank(
    *,
    engine: str,
    vllm_config: Any,
    kv_cache_config: Any,
    kv_caches: Mapping[str, Any],
    place: RankPlace,
    info: Mapping[str, LayerInfo] | None = None,
) -> EngineLayout:
    """The layout of `engine` with this one rank. `kv_caches`: the tensors that vLLM registers, by layer.

    `info`: replaces what is read from vLLM's layers, by layer. Raises LayoutError.
    """
    described = _Rank(vllm_config, int(kv_cache_config.num_blocks), place, info or {})
    groups = []
    for index, group in enumerate(kv_cache_config.transfer_groups):
        group_spec = group.kv_cache_spec
        if type(group_spec).__name__ in WITHOUT_PAGES:
            continue
        specs = getattr(group_spec, "kv_cache_specs", None)
        layers = {name: specs.get(name) if specs is not None else group_spec for name in group.layer_names}
        groups.append(described.add_group(f"g{index}", group_spec, layers, kv_caches))
    return EngineLayout(engine, tuple(described.fields.values()), tuple(groups), (described.rank(),))


class _Rank:
    """Collects the fields, shards and regions of a rank."""

    def __init__(self, vllm_config: Any, num_pages: int, place: RankPlace, info: Mapping[str, LayerInfo]) -> None:
        self.fields: dict[str, Field] = {}
        self._vllm_config, self._num_pages, self._place, self._info = vllm_config, num_pages, place, info
        self._regions: dict[int, Region] = {}
        self._shards: list[Shard] = []
        self._views: list[LayerView] = []

    def add_group(self, name: str, spec: Any, layers: Mapping[str, Any], kv_caches: Mapping[str, Any]) -> Group:
        """Describe the layers of one group; `spec` is the group's own, which may wrap the layers'."""
        added: list[tuple[Kind, Any]] = []
        for layer, own in layers.items():
            info = self._layer_info(layer, own if own is not None else spec)
            if info.shares_with is not None:
                continue
            if own is None:
                raise LayoutError(f"layer '{layer}' is in group '{name}', which has no specification for it")
            reason = {**REFUSED, **release().refused_specs}.get(type(own).__name__)
            if reason is not None:
                raise LayoutError(f"layer '{layer}' ({type(own).__name__}): {reason}; it cannot be moved")
            if layer not in kv_caches:
                raise LayoutError(f"layer '{layer}' of group '{name}' has no registered cache among {len(kv_caches)}")
            added.append((self._add_layer(layer, name, own, info, kv_caches[layer]), own))
        return self._group(name, spec, added)

    def rank(self) -> Rank:
        """The finished rank."""
        return Rank.of(
            self._place.rank,
            self._place.labels,
            tuple(self._regions.values()),
            slabs(POOL, self._views),
            tuple(self._shards),
        )

    def _layer_info(self, layer: str, spec: Any) -> LayerInfo:
        info = self._info.get(layer)
        return read_layer(self._vllm_config, layer, spec, self._place.tp_size) if info is None else info

    def _add_layer(self, name: str, group: str, spec: Any, info: LayerInfo, tensor: Any) -> Kind:
        """Add the fields and shards of a layer. Returns its kind."""
        view = layer_view(name, tensor, self._region(tensor), self._num_pages)
        is_optional = is_draft(name, num_target_layers(self._vllm_config), info.is_draft)
        place = self._layer_place(spec, is_optional)
        found = self._find(name, spec, info, place, is_optional)
        if found.kind is None:
            kind, place = _opaque(spec, info, place, view, found.reason)
            pieces = kind.pieces(name, place, found.style, {"page": view.opaque_view("page")})
        else:
            kind = found.kind
            pieces = _exact_pieces(name, kind, found.style, place, view, int(spec.block_size))
        self._views.append(view)
        for piece in pieces:
            self.fields[piece.field.name] = replace(piece.field, optional=is_optional)
            geometry = Geometry(group, view.page_step, piece.axes)
            self._shards.append(Shard(piece.field.name, view.region, view.offset_bytes + piece.offset_bytes, geometry))
        return kind

    def _layer_place(self, spec: Any, is_draft_layer: bool) -> Place:
        if is_draft_layer and not (release().is_dcp_sharded(spec) and self._place.dcp_size > 1):
            return draft_place(self._vllm_config, self._place)
        return self._place.sharing_sequence() if release().is_dcp_sharded(spec) else self._place.whole_sequence()

    def _find(self, name: str, spec: Any, info: LayerInfo, place: Place, is_draft_layer: bool) -> Found:
        """The kind of the layer, by the type of its specification."""
        from vllm.v1.kv_cache_interface import (
            AttentionSpec,
            CircularBufferSpec,
            HiddenStateCacheSpec,
            MambaSpec,
            MLAAttentionSpec,
            SlidingWindowMLASpec,
        )

        if isinstance(spec, MambaSpec):
            from vllm.model_executor.layers.mamba.mamba_utils import is_conv_state_dim_first

            return state_kind(name, spec, info, place, is_conv_state_dim_first())
        if isinstance(spec, CircularBufferSpec):
            return ring_kind(spec, info)
        if isinstance(spec, HiddenStateCacheSpec) or not isinstance(spec, AttentionSpec):
            return Found(None, reason=type(spec).__name__)
        if isinstance(spec, MLAAttentionSpec | SlidingWindowMLASpec):
            return latent_kind(spec, info)

        def count_heads() -> int:
            window = getattr(spec, "sliding_window", None) is not None
            configured = configured_heads(self._vllm_config, name, is_window=window, is_draft=is_draft_layer)
            return total_kv_heads(name, spec.num_kv_heads, place.tp_size // place.dcp_size, configured)

        return attention_kind(spec, info, count_heads)

    def _group(self, name: str, spec: Any, added: list[tuple[Kind, Any]]) -> Group:
        """The group with the tokens that its pages span; from its specification on a stage without layers of it."""
        specs = [own for _, own in added] or list(getattr(spec, "kv_cache_specs", {}).values())[:1] or [spec]
        spans = {_tokens_per_page(own, self._place.dcp_size if release().is_dcp_sharded(own) else 1) for own in specs}
        if any(kind.is_state and not isinstance(kind, Ring) for kind, _ in added):
            spans = {None}
        if len(spans) != 1:
            raise LayoutError(f"group '{name}': its layers span {sorted(map(str, spans))} tokens per page")
        windows = {window_tokens(own) for own in specs}
        window = None if None in windows else max(window for window in windows if window is not None)
        return Group(name, POOL, self._num_pages, spans.pop(), NULL_PAGE, window)

    def _region(self, tensor: Any) -> str:
        storage = tensor.untyped_storage()
        address = int(storage.data_ptr())
        if address not in self._regions:
            name = f"kv{len(self._regions) or ''}"
            self._regions[address] = Region(name, address, int(storage.nbytes()), str(tensor.device))
        return self._regions[address].name


def _exact_pieces(
    name: str, kind: Kind, style: Style, place: Place, view: LayerView, block_tokens: int
) -> tuple[Piece, ...]:
    """The fields of a layer of known interior. Raises LayoutError if its page is not that of the view."""
    shapes = kind.tensors(place, style, block_tokens)
    expected = [(shape.slots, shape.states, shape.cell_bytes) for shape in shapes]
    if expected != [(view.slots, view.states, view.cell_bytes)]:
        raise LayoutError(
            f"layer '{name}': rank {place.tp_rank} of {place.tp_size} should hold pages of (head slots, "
            f"states, cell bytes) {expected[0]}, but its cache has {(view.slots, view.states, view.cell_bytes)}; the model's "
            f"config and the engine's cache contradict one another ({kind})"
        )
    return kind.pieces(name, place, style, {shapes[0].name: view.page_view(shapes[0])})


def _opaque(spec: Any, info: LayerInfo, place: Place, view: LayerView, reason: str) -> tuple[Kind, Place]:
    """The page as bytes, with a tag of everything that could give them another meaning.

    Each rank holds a part of its own, unless all ranks are replicas.
    """
    import vllm

    place = Place() if release().is_tp_replica(spec) and place.dcp_size == 1 else place
    tag = "/".join(
        (
            f"vllm-{vllm.__version__.split('+')[0]}",
            info.backend,
            f"{info.platform}-{info.device}" if info.device else info.platform,
            info.cache_dtype or "auto",
            _content(spec),
            type(spec).__name__,
            f"{view.order}/{view.block_states}x{view.cell_bytes}",
            *((f"dcp={place.dcp_size}x{place.interleave}",) if place.dcp_size > 1 else ()),
            *((f"scales={info.scales[0]:.9g},{info.scales[1]:.9g}",) if info.scales is not None else ()),
            reason,
        )
    )
    if type(spec).__name__ in ("MambaSpec", "CircularBufferSpec"):
        return Opaque(view.page_bytes, None, tag), place
    return Opaque(view.page_bytes, int(spec.block_size) * place.dcp_size, tag), place


def _tokens_per_page(spec: Any, dcp_size: int) -> int | None:
    """Tokens of a page over all ranks; None for a state. A ring's page spans its capacity."""
    return None if type(spec).__name__ == "MambaSpec" else int(spec.block_size) * dcp_size


def _content(spec: Any) -> str:
    """Dtypes, and for states their shapes, which also show the order of a convolution."""
    shapes = getattr(spec, "shapes", ((),))
    dtypes = getattr(spec, "dtypes", None) or (getattr(spec, "dtype", "none"),)
    return "+".join(
        f"{'x'.join(map(str, shape))}{':' if shape else ''}{str(dtype).removeprefix('torch.')}"
        for shape, dtype in zip(shapes, dtypes, strict=True)
    )
