"""The table of `docs/reference/prompts.md`: what of a prompt is compared, carried or refused, row by row.

And vLLM's own list: what it hashes blocks with. Something new there needs a row here.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
from tests.vllm import schedulers
from tests.vllm.schedulers import TOKENS, Decode, full, groups, picture, prefill
from transformers.models.qwen3_omni_moe.configuration_qwen3_omni_moe import Qwen3OmniMoeConfig
from vllm.lora.request import LoRARequest
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from kvreshard.session.commands import Failure, Release, Renew, StopRenewing
from kvreshard.vllm import params as vllm_params
from kvreshard.vllm.items import Positions, digest_grid, isolate
from kvreshard.vllm.missing_items import MissingItems
from kvreshard.vllm.prompt import Prompt, digest_prompt
from kvreshard.vllm.requests import read_placeholders, read_positions
from kvreshard.vllm.sources import SourceHosts

pytestmark = pytest.mark.vllm

PAGE = Path(__file__).parents[2] / "docs/reference/prompts.md"
PLACEHOLDER = 700
REFUSED = "refused"
GONE = Failure("handshake", "nobody is there")


def asked_of(theirs: dict[str, Any], mine: dict[str, Any], positions: Positions = Positions.PLAIN) -> tuple[Any, str]:
    """(tokens loaded of 299 or `REFUSED`, the salt that the decode engine's blocks are hashed with)."""
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]], positions=positions, **theirs)
    decode = Decode(full(128), positions=positions)
    asked = decode.arrive(params, TOKENS, **mine)
    count = decode.side.count_loadable(asked, 0)
    return (REFUSED if decode.side.missing_items.why_refused(asked, 0, count) else count), asked.cache_salt or ""


def items(*features: Any) -> dict[str, Any]:
    return {"mm_features": list(features)}


def of_kind(modality: str) -> Callable[[], None]:
    def check() -> None:
        cat, cow = (picture(name, 20, 64, modality=modality) for name in ("cat", "cow"))
        assert asked_of(items(cat), items(cat)) == (299, "")
        salts = [asked_of(items(cat), mine) for mine in (items(cow), items(), items(cow))]
        assert [count for count, _ in salts] == [299] * 3
        assert len({salt for _, salt in salts}) == 3  # no two requests share such blocks
        last = picture("cat", 236, 64, modality=modality)
        assert asked_of(items(last), items(last))[0] == 299
        assert asked_of(items(last), items())[0] == REFUSED  # its last token is computed here

    return check


def with_grids() -> None:
    cat, twin = picture("cat", 20, 64, (1, 8, 8)), picture("cattle", 20, 64, (1, 8, 8))
    wide, bare = picture("wide", 20, 64, (1, 4, 16)), picture("cow", 20, 64)
    for mine, expected in ((cat, 299), (twin, 299), (wide, REFUSED), (bare, REFUSED), (None, REFUSED)):
        features = items() if mine is None else items(mine)
        assert asked_of(items(cat), features, Positions.GRID)[0] == expected


def pruned() -> None:
    cat, cow = picture("cat", 20, 64, (1, 8, 8)), picture("cow", 20, 64, (1, 8, 8))
    assert asked_of(items(cat), items(cat), Positions.PRUNED)[0] == 20
    assert asked_of(items(cat), items(cow), Positions.PRUNED)[0] == REFUSED
    assert asked_of(items(cat), items(), Positions.PRUNED)[0] == REFUSED


def only_here() -> None:
    cat, cow = picture("cat", 20, 64), picture("cow", 150, 64)
    assert asked_of(items(cat), items(cat, cow)) == (150, "")


def embeddings() -> None:
    ones, twos = ({"prompt_embeds": torch.full((300, 8), value)} for value in (1.0, 2.0))
    mixed = ones | {"prompt_is_token_ids": [True] * 10 + [False] * 290}
    assert asked_of(ones, ones) == (299, "")
    assert [asked_of(ones, mine)[0] for mine in (twos, {}, mixed)] == [0, 0, 0]
    assert asked_of({}, ones)[0] == 0


def salts() -> None:
    assert asked_of({"cache_salt": "a"}, {"cache_salt": "a"}) == (299, "a")
    assert asked_of({}, {"cache_salt": "a"}) == (299, "a")
    for mine in ({}, {"cache_salt": "b"}):
        count, salt = asked_of({"cache_salt": "a"}, mine)
        assert count == 299
        assert salt != mine.get("cache_salt", "")
        assert salt.startswith(mine.get("cache_salt", ""))


def adapters() -> None:
    one, two = (LoRARequest(name, number, f"/nowhere/{name}") for number, name in enumerate("ab", 1))
    assert asked_of({"lora_request": one}, {"lora_request": one}) == (299, "")
    assert [asked_of({"lora_request": one}, {"lora_request": mine})[0] for mine in (two, None)] == [0, 0]


ROWS: dict[str, Callable[[], None]] = {
    "picture": of_kind("image"),
    "audio": of_kind("audio"),
    "video": of_kind("video"),
    "the same, where positions depend on its grid (M-RoPE)": with_grids,
    "the same, with `--video-pruning-rate` and M-RoPE": pruned,
    "one that only the decode engine has": only_here,
    "prompt embeddings": embeddings,
    "`cache_salt`": salts,
    "adapter (LoRA)": adapters,
}


@pytest.mark.parametrize("row", ROWS)
def test_a_row_of_the_table_holds(row: str) -> None:
    ROWS[row]()


def test_the_page_has_these_rows() -> None:
    _, _, table = PAGE.read_text().partition("| of a prompt |")
    rows = re.findall(r"^\| ([^|]+?) \|", table.partition("\n\n")[0], re.MULTILINE)
    assert rows == list(ROWS)


def test_every_key_that_vllm_hashes_blocks_with_has_a_row() -> None:
    sources = {name for name in vars(kv_cache_utils) if re.fullmatch(r"_gen_\w+_extra_hash_keys", name)}
    assert sources == {"_gen_mm_extra_hash_keys", "_gen_lora_extra_hash_keys", "_gen_prompt_embeds_extra_hash_keys"}
    assert kv_cache_utils.generate_block_hash_extra_keys.__code__.co_names.count("cache_salt") == 1


def test_what_is_isolated_shares_no_block_of_vllms_prefix_cache() -> None:
    init_none_hash(sha256)
    made = [
        Request(str(i), list(range(70)), SamplingParams(max_tokens=20), None, block_hasher=get_request_block_hasher(16, sha256))
        for i in range(3)
    ]  # fmt: skip
    isolate(made[1])
    isolate(made[2])
    for request in made:
        request.append_output_token_ids(list(range(20)))
        assert len(request.block_hashes) == 5
    assert len({block for request in made for block in request.block_hashes}) == 15


def element(value: Any) -> SimpleNamespace:
    return SimpleNamespace(data=value)


def test_a_grid_is_what_is_small_of_an_item() -> None:
    grid, pixels = torch.tensor([1, 8, 8]), torch.zeros(64, 24)
    found = digest_grid({"image_grid_thw": element(grid), "pixel_values": element(pixels)})
    assert found
    assert digest_grid({"image_grid_thw": element(grid[None]), "image_embeds": element(torch.ones(64, 99))}) == found
    times = {"video_grid_thw": element(grid), "timestamps": element([0.5, 1.0])}
    assert digest_grid(times) != digest_grid({**times, "timestamps": element([0.5, 2.0])})
    assert digest_grid({"image_grid_thw": element(None), "pixel_values": element(pixels)}) == ""
    assert digest_grid({"pixel_values": element(pixels)}) == digest_grid({}) == digest_grid(None) == ""


def test_what_is_loaded_under_another_salt_is_found_by_no_other_request() -> None:
    init_none_hash(sha256)
    hasher = get_request_block_hasher(16, sha256)
    known = MissingItems(Positions.PLAIN, frozenset())

    def blocks_of(theirs: str, mine: str | None) -> tuple[bytes, ...]:
        made = Request("r", list(range(70)), SamplingParams(), None, cache_salt=mine, block_hasher=hasher)
        known.arrive(made, digest_prompt(Prompt(range(70), salt=theirs), 70, bytes(32)), bytes(32))
        return tuple(made.block_hashes)

    plain, salted = (
        Request("r", list(range(70)), SamplingParams(), None, cache_salt=salt, block_hasher=hasher)
        for salt in (None, "a")
    )
    assert blocks_of("", None) == tuple(plain.block_hashes)
    assert blocks_of("a", "a") == blocks_of("", "a") == tuple(salted.block_hashes)
    found = [plain.block_hashes, salted.block_hashes, *(blocks_of("a", mine) for mine in (None, None, "b", "b"))]
    assert len({block for blocks in found for block in blocks}) == 6 * 4


CAT, COW = picture("cat", 20, 64), picture("cow", 20, 64)


@pytest.mark.parametrize(
    ("theirs", "mine", "is_isolated"),
    [
        (items(CAT), items(CAT), False),
        (items(CAT), items(COW), True),
        (items(CAT), items(), True),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, False),
        ({"cache_salt": "a"}, {}, True),
    ],
)
def test_items_of_a_source_that_is_new_are_compared_once_it_is_met(
    theirs: dict[str, Any], mine: dict[str, Any], is_isolated: bool
) -> None:
    """Before vLLM looks for prefix hits again: until then the request waits, whatever hits it has."""
    decode = Decode(full(128), has_met=False)
    asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]], **theirs), TOKENS, **mine)
    assert [decode.side.count_loadable(asked, hit) for hit in (0, 256, 299)] == [None] * 3
    assert (asked.cache_salt or "") == mine.get("cache_salt", "")
    decode.meet({"d-1": schedulers.KEY}, {"d-1": GONE})
    salt = asked.cache_salt
    assert ("kvreshard" in (salt or "")) == is_isolated
    assert decode.side.count_loadable(asked, 0) == 299
    assert not decode.side.missing_items.why_refused(asked, 0, 299)
    decode.meet({"d-1": schedulers.KEY}, {"d-1": GONE})
    assert asked.cache_salt == salt  # blocks are hashed by now


def test_what_turns_out_to_be_hopeless_gives_its_source_back() -> None:
    decode = Decode(full(128), has_met=False, positions=Positions.GRID)
    grid = picture("cat", 20, 64, (1, 8, 8))
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]], positions=Positions.GRID, **items(grid))
    asked = decode.arrive(params, TOKENS)
    assert [type(order) for order in decode.meet({"d-1": schedulers.KEY})] == [StopRenewing, Release]
    assert decode.side.missing_items.why_refused(asked, 0, decode.side.count_loadable(asked, 0))


NOBODY: dict[str, Callable[[Decode], object]] = {
    "unmet": lambda decode: decode.meet({}, {"d-1": GONE}),
    "reset": lambda decode: list(decode.side.reset()),
    "deadlock": lambda decode: list(decode.side.give_up_longest()),
    "pool": lambda decode: list(decode.side.give_up("d-1", "pool")),
    "role": lambda _: None,
    "host": lambda _: None,
}


@pytest.mark.parametrize("how", NOBODY)
def test_without_the_sources_key_a_request_with_items_is_refused_and_one_without_is_not(how: str) -> None:
    """The items may be others on purpose: to compute them from what is here would be a wrong text."""
    options: dict[str, Any] = {"role": {"may_load": False}, "host": {"hosts": SourceHosts(("10.0.0.0/8",))}}.get(
        how, {}
    )
    for theirs, mine, is_refused, is_isolated in (
        (items(CAT), items(CAT), True, True),
        (items(CAT), items(), True, True),
        ({"cache_salt": "a"}, {"cache_salt": "a"}, False, True),
        ({}, {}, False, False),
    ):
        decode = Decode(full(128), has_met=False, **options)
        asked = decode.arrive(prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]], **theirs), TOKENS, **mine)
        NOBODY[how](decode)
        count = decode.side.count_loadable(asked, 0)
        assert count == (299 if how == "unmet" else 0)  # ordered, so that it fails by the engine's policy
        reason = decode.side.missing_items.why_refused(asked, 0, count)
        assert bool(reason) == is_refused
        assert ("its source could not be asked" in reason) == is_refused
        assert ("kvreshard" in (asked.cache_salt or "")) == is_isolated


def test_an_engine_that_goes_on_with_its_own_prefill_knows_its_items() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]], **items(CAT))
    for mine, is_refused in ((items(CAT), False), (items(COW), True), (items(), True)):
        decode = Decode(full(64), engine="p", has_met=False, own_key=schedulers.KEY)
        asked = decode.arrive(params, TOKENS, **mine)
        assert decode.fallbacks == ["itself"]
        assert bool(decode.side.missing_items.why_refused(asked, 0, 0)) == is_refused


def test_a_source_is_given_back_at_once_where_nothing_helps() -> None:
    params = prefill(
        groups(full(64)),
        TOKENS,
        [[1, 2, 3, 4, 5]],
        positions=Positions.GRID,
        **items(picture("cat", 20, 64, (1, 8, 8))),
    )
    decode = Decode(full(128), positions=Positions.GRID)
    decode.arrive(params, TOKENS)
    assert [type(order) for order in decode.watched] == [Release]
    decode = Decode(full(128))
    decode.arrive(params, TOKENS)
    assert [type(order) for order in decode.watched] == [Renew]


def test_tokens_that_stand_for_a_picture_are_not_computed_without_one_whatever_became_of_the_parameters() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]])
    del params[vllm_params.KEY]
    tokens = [*TOKENS[:20], *[PLACEHOLDER] * 64, *TOKENS[84:]]
    for mine, expected in (
        (items(), "token 20 stands for"),
        (items(picture("cat", 20, 63)), "token 83 stands for"),
        (items(picture("cat", 20, 64)), ""),
    ):
        decode = Decode(full(128), placeholders=frozenset({PLACEHOLDER}))
        asked = decode.arrive(params, tokens, **mine)
        reason = decode.side.missing_items.why_refused(asked, 0, decode.side.count_loadable(asked, 0))
        assert reason.startswith(expected)
        assert bool(reason) == bool(expected)


@pytest.mark.parametrize("differs", ["adapter", "text"])
def test_tokens_that_stand_for_a_picture_are_not_computed_without_it_behind_another_text(differs: str) -> None:
    """The platform has taken the picture out, and the text in front of it, or the adapter, is another here."""
    there, here = (LoRARequest(name, number, f"/nowhere/{name}") for number, name in enumerate("ab", 1))
    tokens = [*TOKENS[:100], *[PLACEHOLDER] * 64, *TOKENS[164:]]
    mine = [*tokens[:70], 9, *tokens[71:]] if differs == "text" else tokens
    lora: dict[str, Any] = {"lora_request": here} if differs == "adapter" else {}
    cat = picture("cat", 100, 64)
    theirs = items(cat) | ({"lora_request": there} if differs == "adapter" else {})
    params = prefill(groups(full(64)), tokens, [[1, 2, 3, 4, 5]], **theirs)
    for token_ids, features, is_refused in (
        (mine, items(), True),
        (mine, items(picture("cat", 100, 63)), False),
        (mine, items(cat), False),
        (mine[:100] + TOKENS[:64], items(), False),  # another text without a picture
        ([*mine[:80], *mine[100:]], items(picture("cat", 80, 64)), False),
    ):
        decode = Decode(full(128), placeholders=frozenset({PLACEHOLDER}))
        asked = decode.arrive(params, token_ids, **features, **lora)
        count = decode.side.count_loadable(asked, 0)
        assert count == (64 if differs == "text" else 0)
        reason = decode.side.missing_items.why_refused(asked, 0, count)
        assert bool(reason) == is_refused, (token_ids, features)
        assert not reason or reason.startswith("token 100 stands for a picture")


@pytest.mark.parametrize("engine", ["d", "p"])
def test_a_picture_that_stands_twice_in_a_prompt_is_needed_twice(engine: str) -> None:
    """A token in front of both is not here, so that both stand elsewhere; and one of them is here as text only."""
    tokens = [*TOKENS[:100], *[PLACEHOLDER] * 20, *TOKENS[120:140], *[PLACEHOLDER] * 20, *TOKENS[160:]]
    params = prefill(
        groups(full(64)), tokens, [[1, 2, 3, 4, 5]], **items(picture("cat", 100, 20), picture("cat", 140, 20))
    )
    first, second = picture("cat", 99, 20), picture("cat", 139, 20)
    for features, is_refused in ((items(first, second), False), (items(first), True), (items(second), True)):
        decode = Decode(full(64), engine=engine, own_key=schedulers.KEY, placeholders=frozenset({PLACEHOLDER}))
        asked = decode.arrive(params, [*tokens[:50], *tokens[51:]], **features)
        count = decode.side.count_loadable(asked, 0)
        assert count == (48 if engine == "d" else 0)  # nothing of the engine's own
        assert bool(decode.side.missing_items.why_refused(asked, 0, count)) == is_refused


def test_a_load_that_has_failed_is_refused_and_prefix_hits_may_do() -> None:
    params = prefill(groups(full(64)), TOKENS, [[1, 2, 3, 4, 5]], **items(picture("cat", 20, 64)))
    decode = Decode(full(128))
    asked = decode.arrive(params, TOKENS)
    assert not decode.side.missing_items.why_refused(asked, 0, decode.side.count_loadable(asked, 0))
    assert "needs the first 84 tokens" in decode.side.missing_items.why_refused(asked, 64, 0)
    assert not decode.side.missing_items.why_refused(asked, 128, 0)
    asked.get_skip_reading_prefix_cache = lambda: True  # vLLM then takes no load
    assert decode.side.missing_items.why_refused(asked, 0, 299)
    list(decode.side.abort("d-1"))
    assert not decode.side.missing_items.why_refused(asked, 0, 0)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (SimpleNamespace(image_token_id=7, video_token_index=8, audio_token_id=None, image_token=9), {7, 8}),
        (SimpleNamespace(media_placeholder_token_id=163605), {163605}),
        (SimpleNamespace(im_patch_id=100295), {100295}),
        (SimpleNamespace(image_patch_id=151938, image_col_id=151939), {151938}),
        (Qwen3OmniMoeConfig(), {151646, 151655, 151656}),
        (SimpleNamespace(vocab_size=8), set()),
    ],
    ids=["usual", "Kimi", "Ernie", "Molmo", "Qwen Omni", "text only"],
)
def test_tokens_that_stand_for_items_are_read_from_the_model(config: Any, expected: set[int]) -> None:
    assert read_placeholders(SimpleNamespace(model_config=SimpleNamespace(hf_config=config))) == expected


@pytest.mark.parametrize(
    ("uses_mrope", "is_pruned", "expected"),
    [(False, True, Positions.PLAIN), (True, False, Positions.GRID), (True, True, Positions.PRUNED)],
)
def test_what_positions_depend_on_is_read_from_the_model(
    uses_mrope: bool, is_pruned: bool, expected: Positions
) -> None:
    media = SimpleNamespace(is_multimodal_pruning_enabled=lambda: is_pruned)
    model = SimpleNamespace(uses_mrope=uses_mrope, multimodal_config=media)
    assert read_positions(SimpleNamespace(model_config=model)) is expected
