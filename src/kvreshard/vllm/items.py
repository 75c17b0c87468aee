"""Multimodal items of a prompt (pictures, audio, video), and what follows where the decode engine has others, or none.

Platforms send the decode engine the same expanded token ids with another item, or none, on purpose: all that it needs of a picture is in
the cache that it loads. So

1. both sides list their items: where each stands, vLLM's hash of it, and a digest of what positions depend on. Hash and digest travel
   as digests under the request's key (`with_key`), and are compared under it.
2. `compare` finds the prefill's items that the decode engine lacks. It cannot compute their tokens: up to the end of the last one, all
   comes from the prefill, or the request is refused (`Comparison.num_needed`).
3. An item that only the decode engine has is computed there: nothing is loaded from its first token on (`Comparison.num_loadable`).
4. Where positions depend on the items (M-RoPE), the decode engine needs an item of the same grid in the same place, or the request
   is refused (`Comparison.refusal`): it computes the positions of its own tokens from them. Where a pruned video moves them, nothing is
   loaded from its first token on.

`isolate` keeps what was loaded for one item from being a prefix hit of a request with another item, or with none.
"""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np

if TYPE_CHECKING:
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.v1.request import Request

MAX_POSITION = 1 << 40
# Grids, lengths and timestamps are below, pixels and embeddings above. Integers may be masks.
MAX_FLOATS, MAX_INTEGERS = 64, 4096

_Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_POSITION)]
_Digest = Annotated[str, msgspec.Meta(max_length=64)]


class Item(msgspec.Struct, frozen=True):
    """First token and number of tokens of an item, vLLM's hash of it (`name`) and a digest of its grid; or keyed digests of these two.

    `grid` is empty where positions do not depend on it, or where this process does not hold the item.
    """

    first: _Count
    num_tokens: _Count
    name: _Digest
    grid: _Digest = ""

    @property
    def end(self) -> int:
        """The token behind its last one."""
        return self.first + self.num_tokens

    @property
    def key(self) -> tuple[int, int, str]:
        """Equal for the same item in the same place."""
        return self.first, self.num_tokens, self.name


class Positions(Enum):
    """What the positions of a prompt's tokens depend on: their count, the grids of items (M-RoPE), or what the encoder leaves of a video
    (M-RoPE with `--video-pruning-rate`), which only an engine that has encoded it knows.
    """

    PLAIN = "plain"
    GRID = "grid"
    PRUNED = "pruned"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Leading tokens that may be loaded (None: all), and that cannot be computed here (`num_needed`).

    `refusal`: why the request can be neither loaded nor computed; empty if it can.
    """

    num_loadable: int | None = None
    num_needed: int = 0
    refusal: str = ""


def read_items(features: Iterable[MultiModalFeatureSpec], positions: Positions) -> tuple[Item, ...]:
    """The items of a request, in the order of their tokens."""
    items = (
        Item(
            int(feature.mm_position.offset),
            int(feature.mm_position.length),
            feature.mm_hash or feature.identifier,
            "" if positions is Positions.PLAIN else digest_grid(feature.data),
        )
        for feature in features
    )
    return tuple(sorted(items, key=lambda item: (item.first, item.num_tokens, item.name)))


def digest_grid(data: Mapping[str, Any] | None) -> str:
    """A digest of an item's small fields (grid, lengths, timestamps), which determine the positions of its tokens.

    Empty where nothing is known: without the item, where a part of it is in another process, or where it has no such field.
    """
    parts = {} if data is None else {name: element.data for name, element in data.items()}
    if any(part is None for part in parts.values()):
        return ""
    small = sorted((name, value) for name, part in parts.items() if (value := _small(part)) is not None)
    return hashlib.blake2b(repr(small).encode(), digest_size=16).hexdigest() if small else ""


def compare(
    theirs: Sequence[Item], mine: Sequence[Item], num_prompt: int, first_other: int | None, positions: Positions
) -> Comparison:
    """Compare the prefill's items with those of a decode prompt of `num_prompt` tokens.

    `first_other`: the token ids differ at this token or before; None if they do not, or have not been compared. Behind it stands another
    text, whose items are this engine's own.
    """
    end = num_prompt if first_other is None else min(num_prompt, first_other)
    same = {item.key for item in theirs} & {item.key for item in mine}
    places = {item.first for item in theirs}
    own = [item for item in mine if item.key not in same]
    others = [item for item in theirs if item.key not in same and item.first < end]
    # The same item a few tokens on: the prompts differ before it, and this engine has all that it needs. Each stands for one.
    elsewhere = Counter(item.name for item in own if item.first not in places)
    missing, limits = list[Item](), list[int]()
    for item in others:
        if elsewhere[item.name] > 0:
            elsewhere[item.name] -= 1
            limits.append(item.first)
        else:
            missing.append(item)
    taken = np.array([(item.first, item.end) for item in missing]).reshape(-1, 2)
    limits += [item.first for item in own if not ((taken[:, 0] < item.end) & (item.first < taken[:, 1])).any()]
    if positions is Positions.PRUNED:
        limits += [item.first for item in theirs]
    refusal = "" if positions is Positions.PLAIN else _compare_grids(missing, mine)
    return Comparison(min(limits, default=None), max((item.end for item in missing), default=0), refusal)


def first_difference(theirs: Iterable[Item], mine: Iterable[Item], positions: Positions) -> int | None:
    """The first token of an item that the other side lacks, both sides' digests under one key; None if they have the same.

    Where a pruned video moves positions, the first token of any item.
    """
    there, here = {item.key for item in theirs}, {item.key for item in mine}
    different = there | here if positions is Positions.PRUNED else there ^ here
    return min((first for first, _, _ in different), default=None)


def find_unseen(
    token_ids: Sequence[int], items: Iterable[Item], placeholders: frozenset[int], start: int = 0
) -> int | None:
    """The first token from `start` on that stands for an item which is not among `items`; None if there is none."""
    if not placeholders:
        return None
    stands = np.isin(np.asarray(token_ids, dtype=np.int64), list(placeholders))
    for item in items:
        stands[item.first : item.end] = False
    stands[:start] = False
    return int(stands.argmax()) if stands.any() else None


def isolate(request: Request) -> None:
    """Hash the request's blocks with a key of its own, so that they are prefix hits of no other request, and the other way round.

    vLLM hashes the first block of a request with its `cache_salt`, and each block with the one before (0.32.0, `generate_block_hash_extra_keys`).
    """
    request.cache_salt = f"{request.cache_salt or ''}|kvreshard request {secrets.token_hex(16)}"
    request.block_hashes.clear()
    request.update_block_hashes()


def with_key(items: Iterable[Item], key: bytes) -> tuple[Item, ...]:
    """The items as they travel, with keyed digests in place of name and grid."""
    return tuple(
        Item(item.first, item.num_tokens, digest_with_key(item.name, key), digest_with_key(item.grid, key))
        for item in items
    )


def digest_with_key(text: str, key: bytes) -> str:
    """A keyed digest; empty for an empty text."""
    return hashlib.blake2b(text.encode(), key=key, digest_size=16).hexdigest() if text else ""


def _compare_grids(missing: Sequence[Item], mine: Sequence[Item]) -> str:
    for item in missing:
        here = next((other for other in mine if other.first == item.first), None)
        if here is None:
            return (
                f"the prefill has an item at tokens {item.first} to {item.end} and this engine has none there; the positions of this model's "
                "tokens depend on its grid (M-RoPE): send the item, or a placeholder of the same grid"
            )
        if (here.num_tokens, here.grid) != (item.num_tokens, item.grid) or not item.grid:
            known = "unknown" if not (here.grid and item.grid) else f"{item.grid} and {here.grid}"
            return (
                f"the item at token {item.first} has {item.num_tokens} tokens at the prefill and {here.num_tokens} here, digests of their grids: "
                f"{known}; the positions of this model's tokens depend on the grid (M-RoPE): send the same item, or a placeholder of the same grid"
            )
    return ""


def _small(value: Any) -> Any:
    """A field's value as something to digest; None for pixels and embeddings."""
    if isinstance(value, list | tuple):
        parts = [_small(part) for part in value]
        return None if len(parts) > MAX_INTEGERS or any(part is None for part in parts) else parts
    if not hasattr(value, "numel"):
        return value
    is_small = value.numel() <= (MAX_FLOATS if value.is_floating_point() else MAX_INTEGERS)
    return value.flatten().tolist() if is_small else None
