"""Do the rows say what the routes do, and do they collapse what is alike and nothing else?"""

from fractions import Fraction

import pytest

from kvreshard.catalog import describe, load, parse_engine
from kvreshard.kinds import Attention, Mamba1, Opaque
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.kinds.mla import Latent
from kvreshard.model import EngineLayout, UsageError
from kvreshard.plan import compile_route
from kvreshard.plan.cost import Way
from kvreshard.plan.explain import Explanation, explain, name_fields, number_ranges, transfer_bytes


def engine(tp: int, *, dcp: int = 1, page: int = 4, tokens_per_state: int = 1) -> EngineLayout:
    """Two layers of attention with 2 heads of 4, one of states, one of latents."""
    layers = [
        Layer("layers.0.attn", Attention(2, 4, "bfloat16")),
        Layer("layers.1.attn", Attention(2, 4, "bfloat16")),
        Layer("layers.2.state", Mamba1(8, 2, 3, "bfloat16", "float32")),
        Layer("layers.3.attn", Latent(6, "bfloat16", tokens_per_state=tokens_per_state)),
    ]
    groups = [
        PagedGroup("a", ("layers.0.attn",), page),
        PagedGroup("b", ("layers.1.attn",), page),
        PagedGroup("state", ("layers.2.state",), page),
        PagedGroup("latent", ("layers.3.attn",), page),
    ]
    return assemble(f"tp{tp}", layers, groups, Grid(tp, dcp_size=dcp), order="NHD", num_pages=8)


def explained(src: EngineLayout, dst: EngineLayout, way: Way | None = None) -> Explanation:
    return explain([compile_route(src, dst, rank.rank, way=way) for rank in dst.ranks])


def test_bytes_are_those_of_the_fields() -> None:
    explanation = explained(engine(1), engine(1))
    assert explanation.bytes_per_token == 2 * (2 * 2 * 4 * 2) + 6 * 2
    assert explanation.state_bytes == 8 * 2 * 2 + 8 * 2 * 4


def test_windows_are_counted_apart_and_the_smaller_one_counts() -> None:
    def of(windows: tuple[int | None, int]) -> EngineLayout:
        layers = [Layer(f"l.{n}", Attention(2, 4, "bfloat16", window_tokens=w)) for n, w in enumerate((*windows, None))]
        groups = [PagedGroup(f"g{n}", (layer.name,), 16) for n, layer in enumerate(layers)]
        return assemble("e", layers, groups, Grid(1), order="NHD", num_pages=8)

    explanation = explained(of((None, 48)), of((32, 64)))
    each = 2 * 2 * 4 * 2
    assert (explanation.bytes_per_token, explanation.window_bytes) == (each, {32: each, 48: each})
    assert [subject.window_tokens for subject in explanation.subjects] == [32, 48, None]


@pytest.mark.parametrize(("src_tp", "dst_tp"), [(1, 2), (2, 1), (2, 3), (4, 2), (3, 4)])
def test_every_destination_rank_reads_each_cell_once(src_tp: int, dst_tp: int) -> None:
    src, dst = engine(src_tp), engine(dst_tp)
    heads = [rank.shard_by_field["layers.0.attn.k"].geometry.axis("head").num_held or 0 for rank in dst.ranks]
    subject = next(s for s in explained(src, dst).subjects if "layers.0.attn.k" in s.fields)
    assert sum(r.num_bytes * len(r.dst_ranks) for r in subject.readings) == sum(heads) * 2 * 2 * 4 * 2


def test_groups_that_are_alike_are_one_subject_with_the_bytes_of_both() -> None:
    explanation = explained(engine(1), engine(2))
    subject = explanation.subjects[0]
    assert subject.fields == tuple(f"layers.{n}.attn.{part}" for n in (0, 1) for part in "kv")
    assert (subject.src_groups, subject.dst_groups) == (("a", "b"), ("a", "b"))
    assert [(r.dst_ranks, r.src_rank, r.num_bytes) for r in subject.readings] == [((0,), 0, 32), ((1,), 0, 32)]
    assert [str(part) for part in subject.readings[1].parts] == ["token all", "head 1 of 2", "channel all 4"]


def test_ranks_that_read_alike_are_one_row() -> None:
    subject = explained(engine(2), engine(4)).subjects[0]
    assert [(r.dst_ranks, r.src_rank) for r in subject.readings] == [((0, 1), 0), ((2, 3), 1)]


def test_unread_sources_have_an_appointed_reporter() -> None:
    everybody = explained(engine(4), engine(1))
    assert everybody.unread == ()
    assert [use.reporters for use in everybody.sources] == [use.readers for use in everybody.sources]
    latent = explained(*[_latent_only(tp) for tp in (3, 1)])
    assert [(use.src_rank, use.readers, use.reporters) for use in latent.unread] == [(1, (), (0,)), (2, (), (0,))]


def _latent_only(tp: int) -> EngineLayout:
    layers = [Layer("layers.0.attn", Latent(6, "bfloat16"))]
    return assemble(f"tp{tp}", layers, [PagedGroup("g", ("layers.0.attn",), 4)], Grid(tp), order="NHD", num_pages=4)


def test_one_route_of_several_does_not_call_others_sources_unread() -> None:
    src, dst = _latent_only(2), _latent_only(2)
    explanation = explain([compile_route(src, dst, 0)])
    assert [use.readers for use in explanation.sources] == [(0,), ()]
    assert explanation.unread == ()


def test_context_parallel_shares_are_exact() -> None:
    explanation = explained(engine(2, dcp=2, tokens_per_state=1), engine(1, page=8))
    latent = explanation.subjects[-1]
    assert [(r.src_rank, r.num_bytes, str(r.parts[0])) for r in latent.readings] == [
        (0, Fraction(6), "token 0 mod 2"),
        (1, Fraction(6), "token 1 mod 2"),
    ]


def test_compressed_tokens_have_a_fraction_of_the_bytes() -> None:
    explanation = explained(engine(1, tokens_per_state=4), engine(1, tokens_per_state=4))
    assert explanation.subjects[-1].readings[0].num_bytes == Fraction(12, 4)


def test_a_page_of_unknown_inside_is_counted_per_token() -> None:
    layers = [Layer("layers.0.attn", Opaque(100, 8, "x"))]
    layout = assemble("e", layers, [PagedGroup("g", ("layers.0.attn",), 8)], Grid(), order="NHD", num_pages=4)
    assert explained(layout, layout).bytes_per_token == Fraction(100, 8)


def test_forced_ways_are_said_to_be() -> None:
    for way in ("direct", "staged"):
        choices = [r.choice for s in explained(engine(1), engine(2), way).subjects for r in s.readings]
        assert {(choice.way, choice.forced) for choice in choices} == {(way, True)}


def test_mixed_engines_and_nothing_at_all_are_mistakes() -> None:
    one, two = compile_route(engine(1), engine(2), 0), compile_route(engine(2), engine(1), 0)
    for routes in ([one, two], []):
        with pytest.raises(UsageError, match="one pair of engines"):
            explain(routes)


def test_a_real_pair_adds_up() -> None:
    model = load("gemma-4-26b-a4b")
    src, dst = (describe(model, parse_engine(f"tp={tp}"), f"tp{tp}") for tp in (4, 8))
    routes = [compile_route(src, dst, rank.rank) for rank in dst.ranks]
    explanation = explain(routes)
    everything = explanation.bytes_per_token + sum(explanation.window_bytes.values())
    assert everything == sum(transfer_bytes(transfer) for route in routes for transfer in route.transfers)
    assert [len(subject.fields) for subject in explanation.subjects] == [50, 10]


@pytest.mark.parametrize(
    ("numbers", "text"),
    [([], ""), ([4], "4"), ([1, 2], "1-2"), ([5, 3], "3,5"), ([0, 2, 4], "0-4 step 2"), ([0, 1, 2, 9, 10], "0-2,9-10")],
)
def test_numbers_read_as_people_write_them(numbers: list[int], text: str) -> None:
    assert number_ranges(numbers) == text


@pytest.mark.parametrize(
    ("names", "text"),
    [
        (["layers.0.attn.k", "layers.0.attn.v"], "layers.0.attn.{k,v}"),
        (["layers.0.a.k", "layers.0.b.k"], "layers.0.{a.k,b.k}"),
        (["layers.0.k", "layers.1.v"], "layers.0.k layers.1.v"),
        (["layers.0.c.B", "layers.0.c.C", "layers.2.c.B", "layers.2.c.C"], "layers.{0,2}.c.{B,C}"),
        (["full"], "full"),
        (["window.0", "window.1"], "window.{0-1}"),
    ],
)
def test_field_names_are_collected(names: list[str], text: str) -> None:
    assert name_fields(names) == text
