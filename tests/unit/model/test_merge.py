"""Do ranks that describe themselves one by one make the engine, and is a contradiction between two of them named?"""

import pytest

from kvreshard.kinds import Attention, Mamba1, Style
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model import EngineLayout, Field, Group, LayoutError, Rank, merge_ranks
from kvreshard.model.changed import replace
from kvreshard.model.wire import decode, encode


def engine(num_stages: int = 2) -> EngineLayout:
    """Two stages of two ranks; the state layer is on the last stage only."""
    layers = [
        Layer("layers.0.attn", Attention(2, 4, "bfloat16")),
        Layer("layers.1.attn", Attention(2, 4, "bfloat16"), num_stages - 1),
        Layer("layers.1.state", Mamba1(4, 4, 4, "bfloat16", "float32"), num_stages - 1),
    ]
    groups = [PagedGroup("g0", ("layers.0.attn", "layers.1.attn"), 4), PagedGroup("g1", ("layers.1.state",), 4)]
    return assemble("decode", layers, groups, Grid(2, num_stages), order="NHD", num_pages=5, style=Style(), null_page=0)


def part(layout: EngineLayout, *ranks: int) -> EngineLayout:
    """What these ranks alone would say."""
    chosen = tuple(rank for rank in layout.ranks if rank.rank in ranks)
    held = {shard.field for rank in chosen for shard in rank.shards}
    return replace(layout, ranks=chosen, fields=tuple(field for field in layout.fields if field.name in held))


def parts(layout: EngineLayout) -> list[EngineLayout]:
    return [part(layout, rank.rank) for rank in layout.ranks]


def changed_group(layout: EngineLayout, name: str, **changes: int | None) -> EngineLayout:
    return replace(layout, groups=tuple(replace(g, **changes) if g.name == name else g for g in layout.groups))


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2)])
def test_ranks_make_the_engine_in_whatever_order_they_come(order: tuple[int, ...]) -> None:
    whole = engine()
    each = parts(whole)
    assert merge_ranks([each[i] for i in order]) == whole


def test_a_part_may_hold_several_ranks_and_travel() -> None:
    whole = engine()
    split = [part(whole, 1, 2), part(whole, 0, 3)]
    merged = merge_ranks([decode(encode(layout)) for layout in split])
    assert merged.ranks == whole.ranks
    assert merged.groups == whole.groups
    assert merged.field_by_name == whole.field_by_name
    assert merge_ranks([whole]) == whole


def test_fields_keep_the_order_of_their_first_appearance() -> None:
    whole = engine()
    names = [field.name for field in merge_ranks(parts(whole)[::-1]).fields]
    assert names[:2] == ["layers.0.attn.k", "layers.0.attn.v"]
    assert len(names) == len(whole.fields)


def test_a_rank_without_layers_of_a_group_has_no_say_about_what_its_pages_span() -> None:
    whole = engine()
    each = parts(whole)
    guess = [changed_group(layout, "g1", tokens_per_page=16, window_tokens=3) for layout in each[:2]]
    assert merge_ranks([*guess, *each[2:]]) == whole
    assert merge_ranks([*each[2:], *guess]) == whole


def refused(facts: str, each: list[EngineLayout]) -> None:
    with pytest.raises(LayoutError) as caught:
        merge_ranks(each)
    for fact in facts.split("|"):
        assert fact in str(caught.value)


def test_nothing_is_no_engine() -> None:
    refused("no part", [])


def test_parts_are_of_one_engine() -> None:
    whole = engine()
    refused("'decode'|'other'", [part(whole, 0), replace(part(whole, 1), engine="other")])


def test_a_rank_describes_itself_once() -> None:
    whole = engine()
    refused("rank 1|twice", [part(whole, 0, 1), part(whole, 1, 2)])


def test_a_field_means_the_same_on_all_ranks() -> None:
    each = parts(engine(1))

    def other(field: Field) -> Field:
        return replace(field, encoding="bfloat16/other") if field.name == "layers.0.attn.k" else field

    each[1] = replace(each[1], fields=tuple(other(field) for field in each[1].fields))
    refused("field 'layers.0.attn.k'|encoding 'bfloat16' on rank 0|'bfloat16/other' on rank 1|same model", each)


def test_groups_share_their_pool() -> None:
    each = parts(engine(1))
    refused("group 'g0'|num_pages 5 on rank 0|num_pages 6 on rank 1", [each[0], with_a_page_more(each[1])])
    other = replace(each[1], groups=tuple(replace(group, null_page=None) for group in each[1].groups))
    refused("group 'g0'|null_page 0 on rank 0|null_page None on rank 1", [each[0], other])


def test_ranks_that_hold_a_group_agree_on_its_window() -> None:
    each = parts(engine(1))
    refused(
        "group 'g0'|window_tokens None on rank 0|window_tokens 7 on rank 1",
        [each[0], changed_group(each[1], "g0", window_tokens=7)],
    )


def test_a_part_of_several_ranks_speaks_for_those_that_hold_the_group() -> None:
    whole = engine(3)
    other = changed_group(part(whole, 5), "g0", window_tokens=7)
    refused("group 'g0'|window_tokens None|window_tokens 7", [part(whole, 2, 3, 4), other])
    assert merge_ranks([part(whole, 2, 3), other]).group_by_name["g0"].window_tokens == 7


def with_a_page_more(layout: EngineLayout) -> EngineLayout:
    """The same rank with one page more, and the memory for it."""
    regions = tuple(replace(region, size_bytes=2 * region.size_bytes) for region in layout.ranks[0].regions)
    groups: tuple[Group, ...] = tuple(replace(group, num_pages=6) for group in layout.groups)
    slabs = tuple(slab for slab in layout.ranks[0].slabs if slab.offset_bytes == 0)
    shards = tuple(shard for shard in layout.ranks[0].shards if shard.field.startswith("layers.0"))
    rank = Rank.of(layout.ranks[0].rank, layout.ranks[0].place, regions, slabs, shards)
    return replace(layout, groups=groups, ranks=(rank,))
