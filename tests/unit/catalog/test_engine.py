"""Is every model of the catalog describable for every engine, and routable between any two of them?

Engines that vLLM could not run are included on purpose: sizes that do not divide one another, page sizes that are no power of
two. `describe` checks each layout by itself, `compile_route` proves each route; what is moved is proved by `tests/property`.
"""

import random

import pytest
from tests.unit.catalog.test_config import PLAIN, changed

from kvreshard.catalog import (
    MODELS,
    EngineSpec,
    Model,
    describe,
    fit_stages,
    load,
    parse_engine,
    read_model,
    shrink,
    warnings,
)
from kvreshard.catalog.engine import CONVOLUTIONAL, even_stages, stage_of_layers
from kvreshard.kinds import Attention
from kvreshard.model import Cyclic, EngineLayout, LayoutError, Ownership, wire
from kvreshard.model.changed import replace
from kvreshard.plan import compile_route, elect, match_fields

ENGINES = (
    "tp=1",
    "tp=2,order=HND",
    "tp=3,pp=2",
    "tp=4,pp=3,order=BLHNC",
    "tp=5,page=48,order=BLNHC",
    "tp=6,order=BHLNC",
    "tp=7,conv=dim-first",
    "tp=8,pp=3+2+1",
    "tp=16",
    "tp=2,interior=separate",
    "tp=2,interior=slots,spec=1",
    "tp=3,order=HND,interior=planes-kt",
    "tp=2,order=HND,interior=tiles,page=64",
    "tp=4,spec=3",
    "tp=2,page=64,kernel=16,order=HND",
)
DCP_ENGINES = ("tp=4,dcp=2", "tp=16,dcp=2,interleave=16", "tp=6,dcp=3,page=8,interleave=4")
DCP_MODELS = ("llama-3.1-8b", "qwen3-32b", "deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2", "kimi-k2.5-eagle3")
PCP_ENGINES = ("tp=2,pcp=4", "tp=2,pcp=3,dcp=3,interleave=2", "tp=2,pcp=2,dcp=4,pp=2,page=8")
PCP_MODELS = ("deepseek-v2-lite", "deepseek-v3", "deepseek-v3.2")
# A state of 128 tokens needs pages of a multiple of them.
V4_PAGES = {"page=48": "page=384", "page=64": "page=128"}


def layouts(model: str, engines: tuple[str, ...]) -> list[EngineLayout]:
    small = shrink(load(model), 6)
    made = []
    for engine in engines:
        if model == "deepseek-v4-flash":
            for page, fitting in V4_PAGES.items():
                engine = engine.replace(page, fitting)
        spec = fit_stages(applied(small, parse_engine(engine)), small.num_layers)
        made.append(describe(small, spec, engine, 3))
    return made


def applied(model: Model, spec: EngineSpec) -> EngineSpec:
    """The engine without what is asked of caches that the model does not have, which `describe` refuses."""
    kinds = [layer.kind for layer in model.layers]
    interior = spec.interior if any(isinstance(kind, Attention) for kind in kinds) else "cell"
    conv = spec.conv_dim_first and any(isinstance(kind, CONVOLUTIONAL) for kind in kinds)
    return replace(spec, interior=interior, conv_dim_first=conv)


@pytest.mark.parametrize(
    ("model", "engine", "told"),
    [
        ("llama-3.1-8b", "draft=on", "'draft': on, but model 'llama-3.1-8b' comes with no draft model; leave it out, or give --draft"),
        ("deepseek-v3", "spec=1,draft=off", "'draft': off, but model 'deepseek-v3' comes with no draft model"),
        ("llama-3.1-8b", "conv=dim-first", "'conv': dim-first, but model 'llama-3.1-8b' has no convolution states"),
        ("deepseek-v3", "interior=planes", "'interior': planes, but model 'deepseek-v3' has no attention over heads"),
    ],
)  # fmt: skip
def test_an_option_that_changes_nothing_is_refused(model: str, engine: str, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        describe(load(model), parse_engine(engine), "e")


def test_a_draft_is_there_unless_it_is_said_not_to_be() -> None:
    model = load("kimi-k2.5-eagle3")
    fields = [
        set(describe(model, parse_engine(f"tp=1{more}"), "e").field_by_name) for more in ("", ",draft=on", ",draft=off")
    ]
    assert fields[0] == fields[1] > fields[2]


@pytest.mark.parametrize("model", MODELS)
def test_any_engine_reaches_any_other(model: str) -> None:
    shared = DCP_ENGINES * (model in DCP_MODELS) + PCP_ENGINES * (model in PCP_MODELS)
    engines = layouts(model, ENGINES + shared)
    shuffled = list(engines)
    random.Random(model).shuffle(shuffled)
    for src, dst in zip(engines, shuffled, strict=True):
        names = match_fields(src, dst).names
        assert all(name in names or name.startswith("mtp.") for name in dst.field_by_name)
        election = elect(src, dst, names)
        for rank in dst.ranks:
            route = compile_route(src, dst, rank.rank, election=election)
            assert all(warning.startswith(("field 'mtp.", "fields 'mtp.")) for warning in route.warnings)


@pytest.mark.parametrize("model", MODELS)
def test_the_wire_keeps_every_layout(model: str) -> None:
    for layout in layouts(model, ("tp=2,pp=2,spec=1", "tp=3,order=BLHNC")):
        assert wire.decode(wire.encode(layout)) == layout


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("engine", ["tp=2,pp=2", "tp=8"])
def test_names_and_extents_do_not_depend_on_the_engine(model: str, engine: str) -> None:
    one, other = layouts(model, ("tp=1", engine))
    assert {field.name: field.axes for field in one.fields} == {field.name: field.axes for field in other.fields}


def test_a_whole_model_is_described_at_full_size() -> None:
    layout = describe(load("deepseek-v3"), parse_engine("tp=16,pp=4"), "prefill")
    assert len(layout.ranks) == 64
    assert [len(layout.ranks[16 * stage].shards) for stage in range(4)] == [15, 15, 16, 15]
    assert {group.null_page for group in layout.groups} == {0}


@pytest.mark.parametrize(
    ("num_layers", "stages"),
    [(61, (31, 30)), (61, (20, 21, 20)), (61, (15, 15, 16, 15)), (62, (15, 16, 16, 15)), (30, (7, 8, 8, 7)),
     (43, (11, 11, 11, 10)), (36, (4, 4, 4, 5, 5, 5, 5, 4)), (7, (2, 2, 2, 1)), (5, (5,)), (2, (0, 1, 1, 0))],
)  # fmt: skip
def test_stages_are_cut_as_vllm_cuts_them(num_layers: int, stages: tuple[int, ...]) -> None:
    assert even_stages(num_layers, len(stages)) == stages


def test_layers_without_a_cache_count_for_stages() -> None:
    model = load("nemotron-3-nano-30b-a3b")
    layout = describe(model, parse_engine("tp=1,pp=10+42"), "e", 2)
    first = {shard.field.rsplit(".", 2)[0] for shard in layout.ranks[0].shards}
    assert max(int(name.split(".")[1]) for name in first) == 9
    assert len(stage_of_layers(model, parse_engine("pp=4"))) == 52


def test_drafts_lie_on_the_last_stage() -> None:
    layout = describe(load("kimi-k2.5-eagle3"), parse_engine("tp=2,pp=3"), "e", 2)
    holders = {rank.rank for rank in layout.ranks if "draft.0.attn.k" in rank.shard_by_field}
    assert holders == {4, 5}
    assert layout.field_by_name["draft.0.attn.k"].optional
    without = describe(load("kimi-k2.5-eagle3"), parse_engine("tp=2,draft=off"), "e", 2)
    assert "draft.0.attn.k" not in without.field_by_name


def test_prefill_context_ranks_hold_the_same_or_share_the_sequence() -> None:
    model = shrink(load("deepseek-v3"), 2)

    def ranks(engine: str) -> list[tuple[dict[str, int], Ownership]]:
        found = describe(model, parse_engine(engine), "e", 2).ranks
        return [(dict(rank.place), rank.shards[0].geometry.axes[0].owned) for rank in found]

    alone = ranks("tp=2")
    assert ranks("tp=2,pcp=4") == [({**place, "pcp": 0}, owned) for place, owned in alone]
    assert ranks("tp=2,pcp=2,dcp=2") == [
        ({"pp": 0, "pcp": pcp, "tp": tp, "dcp": pcp}, Cyclic(pcp, 1, 2)) for pcp in (0, 1) for tp in (0, 1)
    ]
    assert ranks("tp=2,pcp=2,dcp=4,interleave=8") == [
        ({"pp": 0, "pcp": pcp, "tp": tp, "dcp": 2 * tp + pcp}, Cyclic(8 * (2 * tp + pcp), 8, 32))
        for pcp in (0, 1)
        for tp in (0, 1)
    ]


def test_prediction_layers_come_with_speculation() -> None:
    model = load("deepseek-v3")
    assert "mtp.0.attn.latent" not in describe(model, parse_engine("tp=1"), "e", 2).field_by_name
    assert "mtp.0.attn.latent" in describe(model, parse_engine("tp=1,spec=1"), "e", 2).field_by_name


def test_a_stage_that_only_has_states_keeps_the_engines_page_size() -> None:
    layout = describe(load("granite-4-h-small"), parse_engine("tp=1,pp=5+35"), "e", 2)
    strides = {shard.geometry.page_stride_bytes for shard in layout.ranks[0].shards}
    assert strides == {2162688}


def test_a_rank_with_fewer_heads_has_shorter_pages() -> None:
    layout = describe(load("llama-3.1-8b"), parse_engine("tp=3"), "e", 2)
    strides = [rank.shards[0].geometry.page_stride_bytes for rank in layout.ranks]
    assert strides == [2 * 128 * 2 * 2 * 16, 3 * 128 * 2 * 2 * 16, 3 * 128 * 2 * 2 * 16]


def test_page_overrides_reach_one_group_or_a_family() -> None:
    model = load("gemma-4-26b-a4b")

    def tokens(engine: str) -> dict[str, int | None]:
        return {g.name: g.tokens_per_page for g in describe(model, parse_engine(engine), "e", 2).groups}

    assert tokens("tp=2,page.full=8")["full"] == 8
    assert set(tokens("tp=2,page.window=24").values()) == {24, 32}
    changed = tokens("tp=2,page.window=24,page.window.1=7")
    assert (changed["window.0"], changed["window.1"]) == (24, 7)


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ("llama-3.1-8b", "tp=1,pp=20+21", r"stages of 20\+21 = 41 layers, but model 'llama-3.1-8b' has 32"),
        ("llama-3.1-8b", "tp=1,page.ful=8", "group 'ful' is not known; use one of full; did you mean 'full'"),
        ("jamba-1.5-mini", "tp=1,page.state=8", "the page of a state holds it whole"),
        ("llama-3.1-8b", "tp=1,dtype=fp8_ds_mla", "model 'llama-3.1-8b' has no cache of that dtype; use one of auto"),
        ("deepseek-v4-flash", "tp=1,page=64", "a page of 64 tokens is not a positive multiple of 128 tokens per state"),
        ("deepseek-v4-flash", "tp=2,dcp=2,interleave=4", "no multiple of 128 tokens per state; set interleave"),
        ("gemma-4-26b-a4b", "tp=1,order=LHBNC", "order 'LHBNC': overlaid groups cut their pages differently"),
        ("llama-3.1-8b", "tp=2,order=NHD,interior=tiles", "interiors with planes or tiles need"),
        ("llama-3.1-8b", "tp=2,pcp=2", r"'pcp': 2, .* latents .*'full' caches of another kind, .*; leave pcp out$"),
        ("jamba-1.5-mini", "tp=2,pcp=2,dcp=2", "'state' caches of another kind"),
        ("deepseek-v4-flash", "tp=2,pcp=2", "'window' caches of another kind"),
        ("kimi-k2.5-eagle3", "tp=2,pcp=2", r"as in 'draft.0.attn'; leave pcp out, or say draft=off$"),
    ],
)
def test_what_cannot_be_described_is_one_clear_error(model: str, engine: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        describe(load(model), parse_engine(engine), "e", 2)


@pytest.mark.parametrize("engine", ["tp=2,order=LHBNC", "tp=2,page.ful=8"])
def test_what_cannot_be_described_names_the_engine(engine: str) -> None:
    with pytest.raises(LayoutError, match=r"^engine 'decode': (?!engine ')"):
        describe(load("gemma-4-26b-a4b"), parse_engine(engine), "decode", 2)


def test_a_second_draft_is_refused_by_that() -> None:
    with pytest.raises(
        LayoutError, match=r"'kimi-k2\.5-eagle3' comes with a draft of its own, and 'llama-3\.1-8b' is another"
    ):
        load("kimi-k2.5-eagle3", "llama-3.1-8b")


@pytest.mark.parametrize(
    ("model", "engine", "message"),
    [
        ("llama-3.1-8b", "tp=3", "tp=3 and the 8 KV heads of 'full' layers"),
        ("llama-3.1-8b", "tp=5", "tp=5 does not divide the 32 query heads"),
        ("falcon-h1-34b", "tp=4", "tp=4 does not divide the 2 groups"),
        ("llama-3.1-8b", "tp=4,dcp=2", "must hold the same of 8 KV heads"),
        ("deepseek-v3", "tp=2,pcp=2,dcp=2", "pcp=2 with dcp=2: only models with sparse indexers have both"),
        ("gpt-oss-120b", "tp=16,dcp=2", "sliding windows cannot be shared"),
        ("deepseek-v3", "tp=2,dcp=2,interleave=3", "interleave=3 does not divide the 16 tokens"),
        ("deepseek-v3.2", "tp=1,page=32", "page=32: caches of quantised rows need a multiple of 64"),
        ("deepseek-v4-flash", "tp=1,order=NHD", "declares BLHNC only"),
        ("gemma-4-26b-a4b", "tp=1,order=BHLNC", "layers have pages of 2 sizes"),
        ("nemotron-3-nano-30b-a3b", "tp=4,order=BHLNC", "layers have pages of other heads or tokens"),
        ("gemma-4-26b-a4b", "tp=1,page.full=8", "vLLM has no such option"),
        ("jamba-1.5-mini", "tp=3", "tp=3 does not divide the 8,192 channels"),
        ("qwen3.5", "tp=5", "the 48 value heads"),
        ("llama-3.1-8b", "tp=1,pp=33", "a pipeline stage has none"),
        ("llama-3.1-8b", "tp=1,page=7", "page=7: attention over heads needs a multiple of 16 tokens"),
        ("llama-3.1-8b", "tp=1,page=16,kernel=5", "kernel=5 does not divide the 16 tokens of a page of 'full'"),
        ("deepseek-v3", "tp=1,page=16,kernel=32", "kernel=32 does not divide the 16 tokens of a page of 'latent'"),
        ("kimi-k2.5-eagle3", "tp=1,dtype=fp8_ds_mla", "keep the model's dtype"),
    ],
)
def test_what_vllm_would_not_run_is_a_warning(model: str, engine: str, message: str) -> None:
    found = warnings(load(model), parse_engine(engine))
    assert any(message in warning for warning in found), found


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_that_vllm_runs_has_no_warnings(model: str) -> None:
    assert warnings(load(model), parse_engine("tp=1")) == []
    assert warnings(load(model), parse_engine("tp=2,kernel=16")) == []
    assert warnings(load(model), parse_engine("tp=2,pp=2,spec=1")) == []


def test_prefill_context_parallelism_that_vllm_runs_has_no_warnings() -> None:
    assert warnings(load("deepseek-v3"), parse_engine("tp=2,pcp=2")) == []
    assert warnings(load("deepseek-v3.2"), parse_engine("tp=2,pcp=2,dcp=4")) == []


@pytest.mark.parametrize("option", ["page=3", "dtype=float16", "pp=20+21", "page.windw=4"])
def test_a_refusal_says_which_engine(option: str) -> None:
    with pytest.raises(LayoutError, match=r"^engine 'decode': "):
        describe(load("deepseek-v4-flash"), parse_engine(option), "decode")


@pytest.mark.parametrize(
    ("engine", "is_parted"), [("tp=1", False), ("tp=1,pp=2+6", False), ("tp=1,pp=3+5", True), ("tp=1,pp=2", True)]
)
def test_layers_that_read_the_caches_of_others_are_on_their_stage(engine: str, is_parted: bool) -> None:
    """Of eight layers the last three have none: they read those of layers 2, the last window, and 4, the last full one."""
    raw = changed(
        PLAIN, model_type="gemma3n_text", head_dim=256, num_hidden_layers=8, num_kv_shared_layers=3, sliding_window=512,
        layer_types=["sliding_attention"] * 3 + ["full_attention"] * 2 + ["sliding_attention"] * 2 + ["full_attention"],
    )  # fmt: skip
    found = warnings(read_model("m", raw), parse_engine(engine))
    told = "decoder layers up to 7 read the caches of layers from 2 on"
    assert [told in one for one in found] == [True] * is_parted
