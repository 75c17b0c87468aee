"""The request for a digest of some cells of a load: how the reader cuts a load into requests, and how the source answers one.

Reader, `make_requests`: what its route's transfers bring, cut so that one request covers at most `REQUEST_BYTES`. Digests of disjoint cells
add up, so requests can be compared one by one. Each comes with the reader's own cells.

Source, `answer_request`:

1. The request's fields must be the source's own and congruent. Their cells are cut to the ownerships in the request.
2. The cost is bounded before anything is read.
3. The digest is of the pages that the source published under the lease, at the source's own addresses. Neither addresses nor pages come from
   a request: a reader that read other pages gets another digest.

Raises RequestError: unknown fields, a wrong number of axes, too many tokens or bytes. Raises BindError: what `digest` refuses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import prod
from typing import Annotated

import msgspec
import numpy as np

from kvreshard.model.errors import KvReshardError
from kvreshard.model.layout import EngineLayout
from kvreshard.model.ownership import MAX_SIZE, Cyclic, Interval, Ownership
from kvreshard.model.rank import Rank
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan.cover import count_common
from kvreshard.plan.transfer import RankTransfer
from kvreshard.session.lease import Lease
from kvreshard.session.notes import VERSION
from kvreshard.tools.cells import Cells, Cut, of_transfer
from kvreshard.tools.digest import Digest, cut_tokens, digest_cells
from kvreshard.transport.local import LocalMemory

# 16 MiB take some 8 ms to digest: as long as a session's thread may work at a stretch.
REQUEST_BYTES = 16 << 20
REQUEST_FIELDS = 128
# A source answers more than `REQUEST_BYTES`, since one page or one state may be larger.
MAX_BYTES = 8 * REQUEST_BYTES
MAX_TOKENS = 1 << 22
MAX_INTERVALS = 1 << 10
MAX_OWNERSHIPS = 4

Count = Annotated[int, msgspec.Meta(ge=0, le=MAX_SIZE)]
Word = Annotated[int, msgspec.Meta(ge=0)]
Owned = tuple[Count, Count | None, Count | None]
"""An ownership: (start, stop or None, None) is an interval, (start, run, step) a cyclic set."""


class RequestError(KvReshardError):
    """A request that this rank does not answer: for fields that it does not have, or for too many bytes."""


class DigestRequest(msgspec.Struct, frozen=True, array_like=True, tag="digest"):
    """A notification that requests the digest, under `key`, of some cells of `request`. The answer goes to the mailbox, under `token`.

    `word`: the lease's, a secret of its readers. `fields`: congruent fields of the source rank. `within`: per axis, ownerships that a
    coordinate must be in besides the rank's own. `intervals`: tokens.
    """

    version: int
    request: str
    word: Word
    token: Word
    key: bytes
    fields: tuple[str, ...]
    within: tuple[tuple[Owned, ...], ...]
    intervals: tuple[tuple[Count, Count], ...]


_encoder, _decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(DigestRequest)


def write_request(request: DigestRequest) -> bytes:
    """The bytes of a request."""
    return _encoder.encode(request)


def read_request(payload: bytes) -> DigestRequest | None:
    """The request, or None for anything else."""
    try:
        request = _decoder.decode(payload)
    except (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError):
        return None
    return request if request.version == VERSION else None


def is_readable(memory: LocalMemory, rank: Rank) -> bool:
    """Whether all of a rank's memory can be read for digests."""
    return all(memory.reaches(device) for device in set(rank.devices))


def make_requests(
    transfers: Sequence[RankTransfer], request: Request, lease: Lease, key: bytes, new_token: Callable[[], int]
) -> Iterator[tuple[int, Cells, DigestRequest]]:
    """Source rank, the reader's own cells, and the digest request about them; every cell that the transfers move is in exactly one.

    `new_token()` returns a random word.
    """
    for transfer in transfers:
        intervals = tuple((int(start), int(stop)) for start, stop in request.intervals[transfer.dst_group.name])
        if not intervals:
            continue
        num_fields, num_tokens = _size(transfer)
        parts = [intervals] if transfer.is_state else list(cut_tokens(intervals, num_tokens))
        within = tuple((_to_owned(axis.dst.owned), _to_owned(axis.chosen)) for axis in transfer.axes)
        cells = of_transfer(transfer, "dst")
        for first in range(0, len(transfer.fields), num_fields):
            fields = transfer.fields[first : first + num_fields]
            mine = cells.only(fields)
            for part in parts:
                message = DigestRequest(VERSION, lease.request, lease.word, new_token(), key, fields, within, part)
                yield transfer.src_rank, mine, message


def answer_request(
    request: DigestRequest, tables: Mapping[str, PageTable], layout: EngineLayout, rank: int, memory: LocalMemory
) -> Digest:
    """The requested digest, from this rank's own memory. `tables`: the pages that were published under the lease.

    Raises RequestError or another KvReshardError.
    """
    cells = _find_cells(request, layout, layout.rank_by_number[rank])
    _check_cost(request, cells)
    return digest_cells(cells, tables, {cells.group.name: request.intervals}, memory, request.key)


def _size(transfer: RankTransfer) -> tuple[int, int]:
    """Fields and tokens of one request about a transfer."""
    per_index = transfer.element_bytes * prod(
        count_common(axis.extent, axis.dst.owned, axis.chosen) for axis in transfer.axes if axis.extent is not None
    )
    if transfer.is_state:
        return max(1, min(REQUEST_FIELDS, REQUEST_BYTES // max(1, per_index))), 1
    page = transfer.src_group.tokens_per_page or 1
    indices = max(1, page // transfer.tokens_per_index)
    num_fields = max(1, min(REQUEST_FIELDS, len(transfer.fields), REQUEST_BYTES // max(1, per_index * indices)))
    tokens = REQUEST_BYTES // max(1, per_index * num_fields) * transfer.tokens_per_index
    tokens = max(transfer.tokens_per_index, min(tokens, MAX_TOKENS))
    return num_fields, tokens // transfer.tokens_per_index * transfer.tokens_per_index


def _find_cells(request: DigestRequest, layout: EngineLayout, rank: Rank) -> Cells:
    shards = []
    for name in request.fields:
        shard = rank.shard_by_field.get(name)
        if shard is None:
            raise RequestError(f"field '{name[:80]}' is not on rank {rank.rank} of engine '{layout.engine}'")
        shards.append(shard)
    if not shards:
        raise RequestError("a digest request names no fields")
    field, geometry = layout.field_by_name[shards[0].field], shards[0].geometry
    for shard in shards:
        other = layout.field_by_name[shard.field]
        if (other.axes, other.element_bytes, shard.geometry) != (field.axes, field.element_bytes, geometry):
            raise RequestError(f"fields '{field.name}' and '{other.name}' differ in shape; ask for them one by one")
    if len(request.within) != len(field.axes) or any(len(owned) > MAX_OWNERSHIPS for owned in request.within):
        raise RequestError(f"{len(request.within)} axes are given; field '{field.name}' has {len(field.axes)}")
    return Cells(
        request.fields,
        np.array([rank.base_address(shard) for shard in shards], dtype=np.int64),
        field.element_bytes,
        layout.group_by_name[geometry.group],
        geometry.page_stride_bytes,
        tuple(
            Cut(axis, mapped, tuple(_from_owned(owned) for owned in owners))
            for axis, mapped, owners in zip(field.axes, geometry.axes, request.within, strict=True)
        ),
    )


def _check_cost(request: DigestRequest, cells: Cells) -> None:
    intervals = request.intervals
    ends = [end for interval in intervals for end in interval]
    if not intervals or len(intervals) > MAX_INTERVALS or any(high < low for low, high in pairwise(ends)):
        raise RequestError(f"{len(intervals)} token intervals; give 1 to {MAX_INTERVALS}, ascending and disjoint")
    num_tokens = sum(stop - start for start, stop in intervals)
    widths = [high - low for low, high in (axis.bounds() for axis in cells.bounded)]
    if min(widths, default=1) <= 0:
        raise RequestError(f"no cell of field '{cells.fields[0]}' lies on this rank and in the requested box")
    sequence = cells.sequence
    indices = 1 if sequence is None else num_tokens // sequence.axis.tokens_per_index + len(intervals)
    num_bytes = cells.element_bytes * prod(widths) * indices * len(cells.fields)
    if num_tokens > MAX_TOKENS or num_bytes > MAX_BYTES:
        raise RequestError(
            f"{num_tokens} tokens of {num_bytes} bytes in one digest request; at most {MAX_TOKENS} and {MAX_BYTES} are answered"
        )


def _to_owned(owned: Ownership) -> Owned:
    return (owned.start, owned.stop, None) if isinstance(owned, Interval) else (owned.start, owned.run, owned.step)


def _from_owned(owned: Owned) -> Ownership:
    start, second, step = owned
    if step is None:
        return Interval(start, second)
    return Cyclic(start, second or 0, step)
