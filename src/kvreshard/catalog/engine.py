"""The layout of an engine, from a model and an `EngineSpec`.

1. Take the layers that this engine has (drafts, prediction layers) in its cache dtype.
2. Cut them into pipeline stages: vLLM 0.32 spreads a remainder over the stages before the last (`distributed/utils.py`).
3. Take every layer's page on the largest rank; next to states, widen the attention page (`paging`).
4. Group and unify (`paging`), name the groups, then apply `page.<group>`.
5. `kinds.assemble` lays out every rank; a rank with fewer heads than the largest has shorter pages, padded where they overlay.

Groups are named by what they keep: `full`, `window`, `chunk`, `latent`, `compressor`, `state`, with a number where there are several (`window.0`).
Names of layers and fields never depend on parallel sizes. Refused: stages that do not add up to the model's layers, options of caches or
groups that the engine does not have (`draft`, `conv`, `interior`, `page.<group>`), `pcp` of models with other caches than latents, and
what `assemble` refuses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from kvreshard.catalog.layers import Model, ModelLayer
from kvreshard.catalog.paging import LayerPage, TableGroup, group_layers, hybrid_page_tokens
from kvreshard.catalog.spec import MIN_PAGES, EngineSpec, unknown
from kvreshard.kinds import Attention, GatedDelta, Kind, Latent, Mamba1, Mamba2, Ring, ScaledRows, ShortConv, Style
from kvreshard.kinds.assemble import ALIASES, NULL_PAGE, Grid, Layer, PagedGroup, assemble
from kvreshard.model import EngineLayout, LayoutError, UsageError
from kvreshard.model.expect import expect, expect_whole
from kvreshard.model.text import MAX_NAME, escaped, is_name

DEFAULT_PAGES = 128
# Page 0 stands for no page.
CONVOLUTIONAL = (GatedDelta, Mamba1, Mamba2, ShortConv)
PageBytes = Callable[[Kind, int], int]


@dataclass(frozen=True, slots=True)
class PagePlan:
    """The caches of an engine with their pages, block tables, order and inside."""

    layers: tuple[ModelLayer, ...]
    pages: tuple[LayerPage, ...]
    groups: tuple[PagedGroup, ...]
    order: str
    style: Style


def describe(model: Model, spec: EngineSpec, engine: str, num_pages: int | None = None) -> EngineLayout:
    """The layout of every rank of `engine`. `num_pages` wins over the spec's. Raises LayoutError, UsageError."""
    expect(engine, str, "the engine's name", "as in 'prefill'")
    if not is_name(engine) or not engine.strip():
        raise UsageError(
            f"engine name '{escaped(engine, 60)}': must have 1 to {MAX_NAME} characters, all of them visible; choose another"
        )
    if num_pages is not None:
        expect_whole(num_pages, "num_pages")
        if num_pages < MIN_PAGES:
            raise UsageError(f"num_pages is {num_pages}; page 0 stands for no page, so a pool has at least {MIN_PAGES}")
        num_pages = int(num_pages)  # NumPy's may be of a few bits, and wrap around
    expect(model, Model, "a model", "what `kvreshard.load` returns")
    expect(spec, EngineSpec, "an engine", "what `kvreshard.parse_engine` returns")
    try:
        plan, stages = plan_pages(model, spec), stage_of_layers(model, spec)
        stage_of = dict(enumerate(stages))
        return assemble(
            engine,
            [Layer(one.name, one.kind, stage_of.get(one.index, spec.pp - 1), one.optional) for one in plan.layers],
            plan.groups,
            grid_of(spec),
            order=plan.order,
            num_pages=num_pages or spec.pages or DEFAULT_PAGES,
            style=plan.style,
            null_page=NULL_PAGE,
        )
    except LayoutError as error:
        named = f"engine '{engine}': "  # a check of the whole layout names it
        raise LayoutError(f"{'' if str(error).startswith(named) else named}{error}") from None


def plan_pages(model: Model, spec: EngineSpec) -> PagePlan:
    """Groups and page sizes of an engine, before any rank is laid out. Raises LayoutError."""
    order = spec.order or model.default_order
    order = ALIASES.get(order, order)
    style = Style(spec.interior, spec.conv_dim_first, spec.spec, spec.kernel)
    layers = engine_layers(model, spec)
    _check_prefill_context(model, spec, layers)
    _check_style(model, spec, layers)
    page_bytes = _page_sizes(spec, style)
    page_tokens = _page_tokens(layers, model.reserved, spec.page or model.default_page, page_bytes)
    padded = max((page_bytes(kind, page_tokens) for kind in _attention(layers)), default=0)
    pages = tuple(_layer_page(layer, page_tokens, padded, style, page_bytes) for layer in layers)
    if not order.startswith("B") and any(page.base == "ring" for page in pages):
        raise LayoutError(
            f"engine option 'order={order}': vLLM keeps the rings of model '{model.name}' only in orders with pages outermost; use "
            f"{model.default_order}"
        )
    tables = group_layers(pages, block_outermost=order.startswith("B"))
    return PagePlan(layers, pages, _paged_groups(layers, tables, spec, order, page_bytes), order, style)


def engine_layers(model: Model, spec: EngineSpec) -> tuple[ModelLayer, ...]:
    """The caches that this engine has, in its dtype."""
    model.check_dtype(spec.dtype)
    _check_draft(model, spec)
    # vLLM 0.32 speculates in one way: with a separate draft, the model's own prediction layers are not made.
    has_draft = spec.draft is not False
    num_drafts = 0 if has_draft and any(layer.optional and not layer.predicts for layer in model.layers) else spec.spec
    return tuple(
        replace(layer, kind=layer.kind_for(spec.dtype))
        for layer in model.layers
        if not layer.optional or (num_drafts >= layer.min_drafts if layer.predicts else has_draft)
    )


def _check_draft(model: Model, spec: EngineSpec) -> None:
    if spec.draft is not None and not any(layer.optional and not layer.predicts for layer in model.layers):
        raise LayoutError(
            f"engine option 'draft': {'on' if spec.draft else 'off'}, but model '{model.name}' comes with no draft model; leave it out, or "
            "give --draft"
        )


def _check_style(model: Model, spec: EngineSpec, layers: Sequence[ModelLayer]) -> None:
    """Refuse options of caches that the engine does not have."""
    if spec.conv_dim_first and not any(isinstance(layer.kind, CONVOLUTIONAL) for layer in layers):
        raise LayoutError(
            f"engine option 'conv': dim-first, but model '{model.name}' has no convolution states; leave it out"
        )
    if spec.interior != EngineSpec().interior and not any(isinstance(layer.kind, Attention) for layer in layers):
        raise LayoutError(
            f"engine option 'interior': {spec.interior}, but model '{model.name}' has no attention over heads; leave it out"
        )


def _check_prefill_context(model: Model, spec: EngineSpec, layers: Sequence[ModelLayer]) -> None:
    """Refuse PCP where some cache is no latent: vLLM 0.32 has none there, so its split is not defined (`v1/worker/gpu/pcp_manager.py:135`)."""
    for layer in layers if spec.pcp > 1 else ():
        kind = layer.kind
        if not isinstance(kind, Latent | ScaledRows) or kind.tokens_per_state > 1 or kind.window_tokens is not None:
            remedy = "leave pcp out" + ("" if not layer.optional or layer.predicts else ", or say draft=off")
            raise LayoutError(
                f"engine option 'pcp': {spec.pcp}, but vLLM 0.32 has prefill context parallelism only where all caches are latents of single "
                f"tokens (MLA), and model '{model.name}' has '{layer.family}' caches of another kind, as in '{layer.name}'; {remedy}"
            )


def grid_of(spec: EngineSpec) -> Grid:
    """The ranks that an engine describes."""
    return Grid(spec.tp, spec.pp, spec.dcp, spec.interleave, spec.pcp)


def stage_of_layers(model: Model, spec: EngineSpec) -> tuple[int, ...]:
    """The pipeline stage of every decoder layer."""
    sizes = spec.stages or even_stages(model.num_layers, spec.pp)
    if sum(sizes) != model.num_layers:
        raise LayoutError(
            f"engine option 'pp': stages of {'+'.join(map(str, sizes))} = {sum(sizes)} layers, but model '{model.name}' has "
            f"{model.num_layers} decoder layers; make the stages add up to that"
        )
    return tuple(stage for stage, size in enumerate(sizes) for _ in range(size))


def even_stages(num_layers: int, num_stages: int) -> tuple[int, ...]:
    """Layers per stage by default: the remainder goes to the stages before the last, backwards.

    >>> even_stages(61, 3), even_stages(43, 4)
    ((20, 21, 20), (11, 11, 11, 10))
    """
    each, rest = divmod(num_layers, num_stages)
    return tuple(each + (1 <= num_stages - 1 - stage <= rest) for stage in range(num_stages))


def _page_sizes(spec: EngineSpec, style: Style) -> PageBytes:
    """Kind and tokens -> bytes of one page on the largest rank of the engine."""
    grid = grid_of(spec)
    places = [grid.place(rank) for rank in range(grid.stage_ranks)]

    @cache
    def page_bytes(kind: Kind, tokens: int) -> int:
        return max(sum(tensor.aligned_page_bytes for tensor in kind.tensors(place, style, tokens)) for place in places)

    return page_bytes


def _page_tokens(
    layers: Sequence[ModelLayer], reserved: Sequence[Kind], page_tokens: int, page_bytes: PageBytes
) -> int:
    """Tokens of the engine's page: those of its option, or as many as a state needs. Drafts do not count."""
    states = [layer.kind for layer in layers if _base(layer.kind) == "state" and not layer.optional]
    attention = _attention(layers)
    if not states or not attention:
        return page_tokens
    return hybrid_page_tokens(
        page_tokens,
        max(page_bytes(kind, 1) for kind in [*states, *reserved]),
        max(page_bytes(kind, 1) for kind in attention),
        latent=not any(isinstance(kind, Attention) for kind in attention),
    )


def _layer_page(layer: ModelLayer, page_tokens: int, padded: int, style: Style, page_bytes: PageBytes) -> LayerPage:
    """A layer's page as vLLM's specs have it before grouping. A state is padded to `padded` bytes."""
    kind, base = layer.kind, _base(layer.kind)
    tokens = layer.page_tokens or page_tokens
    if kind.is_state:
        tokens = kind.capacity(style) if isinstance(kind, Ring) else 0
    size = page_bytes(kind, tokens)
    return LayerPage(
        layer.name,
        layer.family,
        base,
        kind,
        tokens,
        max(size, padded) if base == "state" else size,
        kind.window_tokens,
        rows=not isinstance(kind, Attention),
        replicated=isinstance(kind, ShortConv) and kind.is_replicated,
    )


def _attention(layers: Sequence[ModelLayer]) -> list[Kind]:
    """The caches to whose pages states are padded: those of the model itself with one entry for every token."""
    return [
        layer.kind
        for layer in layers
        if layer.family in ("full", "latent") and not layer.optional and getattr(layer.kind, "tokens_per_state", 1) == 1
    ]


def _base(kind: Kind) -> str:
    """`LayerPage.base` of a kind."""
    if kind.is_state:
        return "ring" if isinstance(kind, Ring) else "state"
    return "full" if kind.window_tokens is None else "window"


def _family(table: TableGroup) -> str:
    """What the pages of a table keep. A table of several families keeps all tokens."""
    return next(iter(table.families)) if len(table.families) == 1 else "full"


def _names(families: Sequence[str]) -> list[str]:
    """The family of each table, with a number where there are several."""
    totals, used = Counter(families), Counter[str]()
    names = []
    for family in families:
        names.append(family if totals[family] == 1 else f"{family}.{used[family]}")
        used[family] += 1
    return names


def _paged_groups(
    layers: Sequence[ModelLayer], tables: Sequence[TableGroup], spec: EngineSpec, order: str, page_bytes: PageBytes
) -> tuple[PagedGroup, ...]:
    """Groups for `assemble`, with the page lengths of `page.<group>`, and padded only where the largest rank's pages are too short.

    A page that cannot be padded (in an order that cuts it into heads) is thus not refused for a rank with fewer heads.
    """
    families = [_family(table) for table in tables]
    names, page_of = _names(families), dict(spec.page_of)
    _check_overrides(page_of, list(dict.fromkeys([*names, *families])))
    lengths = [
        page_of.get(name, page_of.get(family, table.tokens_per_page))
        for name, family, table in zip(names, families, tables, strict=True)
    ]
    kinds = {layer.name: layer.kind for layer in layers}
    sizes_of = [
        [page_bytes(kinds[layer.name], tokens) for layer in table.layers]
        for table, tokens in zip(tables, lengths, strict=True)
    ]
    overridden = any(table.tokens_per_page != tokens for table, tokens in zip(tables, lengths, strict=True))
    overlaid = max(size for sizes in sizes_of for size in sizes) if order[0] == "L" and len(tables) > 1 else 0
    groups = []
    for name, table, tokens, sizes in zip(names, tables, lengths, sizes_of, strict=True):
        planned = overlaid if overridden else table.page_bytes or 0
        is_short = any(size < planned for size in sizes)
        members = tuple(layer.name for layer in table.layers)
        groups.append(PagedGroup(name, members, max(tokens, 1), planned if is_short else 0))
    return tuple(groups)


def _check_overrides(page_of: Mapping[str, int], known: Sequence[str]) -> None:
    """Refuse `page.<group>` of a group or family that the engine does not have, or whose pages have no length to choose."""
    for group in page_of:
        if group not in known:
            raise unknown("engine option 'page.<group>': group", group, known)
        if group.split(".")[0] in ("state", "ring"):
            raise LayoutError(
                f"engine option 'page.{group}': the page of a state holds it whole, that of a ring all its entries; override "
                "another group"
            )
