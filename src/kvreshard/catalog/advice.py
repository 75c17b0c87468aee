"""Warnings about engines that can be described but that vLLM 0.32 would not run.

Sizes that do not divide one another are no error here, but vLLM asserts them at start. Each warning names the option, both values and
vLLM's condition. `assumed` lists what neither the model's file nor the engine settles. Sources: `layers/linear.py`,
`layers/mamba/mamba_mixer2.py`, `config/model.py`, `config/parallel.py`, `v1/worker/utils.py` (`select_common_block_size`),
`resolve_kv_cache_layout` and `get_supported_kernel_block_sizes` in `v1/attention/backends/`.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvreshard.catalog.declared import FP8
from kvreshard.catalog.engine import PagePlan, even_stages, plan_pages, stage_of_layers
from kvreshard.catalog.layers import NATIVE, PACKED, Model, ModelLayer
from kvreshard.catalog.paging import MIN_KERNEL_TOKENS, unifies
from kvreshard.catalog.spec import EngineSpec
from kvreshard.kinds import Attention, GatedDelta, Kind, Latent, LinearState, Mamba1, Mamba2, ScaledRows
from kvreshard.kinds.assemble import ORDERS
from kvreshard.model.text import counted

BLOCK_COMPACT = ("LB", "BL")


def warnings(model: Model, spec: EngineSpec) -> list[str]:
    """Why vLLM 0.32 would not run this engine; empty if no reason is known."""
    plan = plan_pages(model, spec)
    found = [*_tensor_parallel(model, spec, plan), *_context_parallel(spec, plan), *_pages(model, spec, plan)]
    if 0 in (spec.stages or even_stages(model.num_layers, spec.pp)):
        found.append(f"pp={spec.pp}: a pipeline stage has none of the {model.num_layers} decoder layers")
    first, last = model.shared_from, model.num_layers - 1
    if first is not None and (stages := stage_of_layers(model, spec))[first] != stages[last]:
        found.append(
            f"pp={spec.pp}: decoder layers up to {last} read the caches of layers from {first} on, and vLLM finds only those of their own "
            "pipeline stage; use fewer stages, or say the layers of each"
        )
    if spec.dtype == PACKED and any(isinstance(layer.kind, Attention) for layer in plan.layers):
        found.append(f"dtype={PACKED}: attention layers with heads have no such form and keep the model's dtype")
    return list(dict.fromkeys(found))


def assumed(model: Model, spec: EngineSpec) -> list[str]:
    """What is assumed of an engine, beside `model.doubts`; empty if the model's file and the engine settle everything."""
    found = []
    kinds = [layer.kind for layer in model.layers]
    is_sparse = any(isinstance(kind, ScaledRows) for kind in kinds) and any(isinstance(kind, Latent) for kind in kinds)
    if is_sparse and FP8 in (spec.dtype, model.declared if spec.dtype == NATIVE else None):
        has_packed = any(PACKED in layer.kinds for layer in model.layers)
        remedy = f": then give dtype={PACKED}" if has_packed else ", in a form that is not described"
        found.append(
            f"latents beside sparse indexers are read as {FP8}; where FlashMLA reads them vLLM 0.32 packs them{remedy}"
        )
    depends = spec.dtype == NATIVE or any(kind.is_state for kind in kinds)
    if not model.cast_from or not depends:
        return found
    cast = f"the model's file says {model.cast_from}, which vLLM 0.32 runs as {model.dtype}, on GPUs before SM80 as another"
    return [
        *found,
        f"{cast}; if the engine has a --dtype, give dtype= for the cache, or say it in a copy of the file",
    ]


def _tensor_parallel(model: Model, spec: EngineSpec, plan: PagePlan) -> Iterator[str]:
    if model.num_query_heads is not None and model.num_query_heads % spec.tp:
        yield f"tp={spec.tp} does not divide the {model.num_query_heads} query heads; use a divisor"
    for layer in plan.layers:
        for what, number, may_be_replicated in _sharded(layer.kind):
            divides = number % spec.tp == 0 or (may_be_replicated and spec.tp % number == 0)
            if not divides:
                whose = f"the {counted(number, what)} of '{_family(layer)}' layers"
                if may_be_replicated:
                    yield f"tp={spec.tp} and {whose} do not divide one another; use a divisor or a multiple of {number}"
                else:
                    yield f"tp={spec.tp} does not divide {whose}; use a divisor"
        if isinstance(layer.kind, Mamba2) and layer.kind.num_groups % spec.tp and layer.kind.num_groups != 1:
            yield f"tp={spec.tp} does not divide the {layer.kind.num_groups} groups of Mamba-2 layers; use a divisor"


def _sharded(kind: Kind) -> tuple[tuple[str, int, bool], ...]:
    """What tensor parallelism splits: name, number, and whether more ranks than that number may share it."""
    match kind:
        case Attention():
            return (("KV head", kind.num_kv_heads, kind.value_size > 0),)  # inputs of convolutions are not copied
        case Mamba2():
            return (("head", kind.num_heads, False),)
        case Mamba1():
            return (("channel", kind.num_channels, False),)
        case GatedDelta():
            return (("key head", kind.num_key_heads, False), ("value head", kind.num_value_heads, False))
        case LinearState():
            return (("head", kind.num_heads, False),)
        case _:
            return ()


def _family(layer: ModelLayer) -> str:
    return f"draft {layer.family}" if layer.optional else layer.family


def _context_parallel(spec: EngineSpec, plan: PagePlan) -> Iterator[str]:
    if spec.dcp == 1:
        return
    if spec.pcp > 1 and not any(isinstance(layer.kind, ScaledRows) for layer in plan.layers):
        yield f"pcp={spec.pcp} with dcp={spec.dcp}: only models with sparse indexers have both (`v1/worker/gpu/pcp_manager.py`)"
    for layer in plan.layers:
        kind = layer.kind
        if kind.window_tokens is not None:
            yield f"dcp={spec.dcp}: sliding windows cannot be shared over ranks"
        if isinstance(kind, Attention) and spec.tp // spec.dcp < kind.num_kv_heads:
            yield (
                f"dcp={spec.dcp}: ranks that share the sequence must hold the same of {counted(kind.num_kv_heads, 'KV head')}, so "
                f"dcp may be at most tp / KV heads (tp={spec.tp})"
            )
    for group in plan.groups:
        if group.tokens_per_page % spec.interleave and not group.name.startswith("state"):
            yield f"interleave={spec.interleave} does not divide the {group.tokens_per_page} tokens of a page of '{group.name}'"


def _pages(model: Model, spec: EngineSpec, plan: PagePlan) -> Iterator[str]:
    sizes = {page.page_bytes for page in plan.pages}
    kinds = {layer.name: layer.kind for layer in plan.layers}
    forms = {(_heads(kinds[page.name], spec), page.tokens_per_page, page.page_bytes) for page in plan.pages}
    if len(forms) > 1 and plan.order[:2] not in BLOCK_COMPACT:
        what = f"{len(sizes)} sizes" if len(sizes) > 1 else "other heads or tokens"
        yield f"order={plan.order}: layers have pages of {what}; use {', '.join(o for o in ORDERS if o[:2] in BLOCK_COMPACT)}"
    if len(sizes) > 1 and len(plan.groups) > 1 and plan.order[0] == "L" and not unifies(plan.pages):
        yield f"order={plan.order}: pages of latents cannot be brought to one size; use a block-outermost order"
    if spec.page_of:
        yield "page.<group>: vLLM has no such option; its groups follow from the page size"
    yield from _kernel_blocks(spec, plan)
    if model.default_order[0] == "B" and plan.order[0] == "L":
        yield f"order={plan.order}: model type '{model.model_type}' declares {model.default_order} only"


def _heads(kind: Kind, spec: EngineSpec) -> int:
    """Head slots of a rank's page, as vLLM counts them in `resolve_kv_cache_layout`."""
    return max(1, kind.num_kv_heads // spec.tp) if isinstance(kind, Attention) else 1


def _kernel_blocks(spec: EngineSpec, plan: PagePlan) -> Iterator[str]:
    """Conditions of the kernels for pages. Each group picks its kernel blocks, so a group of shorter pages may have none of these."""
    tokens_of = {name: group.tokens_per_page for group in plan.groups for name in group.layers}
    paged = [layer for layer in plan.layers if isinstance(layer.kind, Attention | Latent | ScaledRows)]
    is_used = spec.kernel is not None and any(tokens_of[layer.name] % spec.kernel == 0 for layer in paged)
    for layer in paged:
        tokens = tokens_of[layer.name]
        if spec.kernel is not None and tokens % spec.kernel and (tokens > spec.kernel or not is_used):
            yield f"kernel={spec.kernel} does not divide the {tokens} tokens of a page of '{layer.family}': such a page stays in one piece"
    for layer in plan.layers:
        kind, tokens = layer.kind, tokens_of[layer.name]
        if isinstance(kind, ScaledRows) and kind.kernel_tokens is not None and tokens % kind.kernel_tokens:
            yield f"page={tokens}: caches of quantised rows need a multiple of {kind.kernel_tokens} tokens"
        if isinstance(kind, Attention) and kind.value_size and tokens % MIN_KERNEL_TOKENS:
            yield f"page={tokens}: attention over heads needs a multiple of {MIN_KERNEL_TOKENS} tokens"
