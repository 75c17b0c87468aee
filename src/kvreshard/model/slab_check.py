"""Checks that the slabs of a rank lie in their regions for every page of their pools, and that no two pages share a byte."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from itertools import pairwise

from kvreshard.model.errors import LayoutError
from kvreshard.model.rank import Rank, Slab


def check_slabs(rank: Rank, pages_of_pool: Mapping[str, int]) -> None:
    """Raises LayoutError unless every slab lies in its region and shares no byte with another. Names are already checked."""
    by_region: defaultdict[str, list[Slab]] = defaultdict(list)
    sizes = dict(zip(rank.template.regions, rank.template.region_bytes, strict=True))
    for slab in rank.slabs:
        if slab.offset_bytes < 0 or slab.page_bytes <= 0 or slab.page_stride_bytes < slab.page_bytes:
            raise LayoutError(
                f"rank {rank.rank}: slab in region '{slab.region}' has pages of {slab.page_bytes} bytes every "
                f"{slab.page_stride_bytes} from {slab.offset_bytes}; pages would overlap or lie below the region"
            )
        end = slab.offset_bytes + (pages_of_pool[slab.pool] - 1) * slab.page_stride_bytes + slab.page_bytes
        size = sizes[slab.region]
        if end > size:
            raise LayoutError(
                f"rank {rank.rank}: region '{slab.region}' has {size} bytes, but {pages_of_pool[slab.pool]} pages of "
                f"{slab.page_stride_bytes} bytes end at {end}; register a larger region or fewer pages"
            )
        by_region[slab.region].append(slab)
    for region, slabs in by_region.items():
        if len(slabs) > 1:
            _check_slabs_apart(rank, region, slabs, pages_of_pool)


def _check_slabs_apart(rank: Rank, region: str, slabs: list[Slab], pages_of_pool: Mapping[str, int]) -> None:
    """Slabs of one stride interleave (their phases must not meet); of different strides they must lie one after another."""
    by_stride: defaultdict[int, list[Slab]] = defaultdict(list)
    for slab in slabs:
        by_stride[slab.page_stride_bytes].append(slab)
    extents = []
    for stride, members in by_stride.items():
        members.sort(key=lambda slab: slab.offset_bytes)
        ends = [s.offset_bytes + (pages_of_pool[s.pool] - 1) * stride + s.page_bytes for s in members]
        if len(by_stride) == 1 and all(end <= slab.offset_bytes for end, slab in zip(ends, members[1:], strict=False)):
            return
        cluster: list[Slab] = []
        cluster_end = 0
        for slab, end in zip(members, ends, strict=True):
            if cluster and slab.offset_bytes < cluster_end:
                cluster.append(slab)
                cluster_end = max(cluster_end, end)
            else:
                if cluster:
                    _check_phases(rank, region, stride, cluster)
                    extents.append((cluster[0].offset_bytes, cluster_end))
                cluster, cluster_end = [slab], end
        _check_phases(rank, region, stride, cluster)
        extents.append((cluster[0].offset_bytes, cluster_end))
    extents.sort()
    for (_, end), (start, _) in pairwise(extents):
        if start < end:
            raise LayoutError(
                f"rank {rank.rank}, region '{region}': slabs of different page strides overlap at byte {start}; "
                "overlaid groups must share one pool and one stride"
            )


def _check_phases(rank: Rank, region: str, stride: int, cluster: list[Slab]) -> None:
    spans = sorted((slab.offset_bytes % stride, slab.page_bytes) for slab in cluster)
    wrapped = [*spans, (spans[0][0] + stride, spans[0][1])]
    for (start, size), (following, _) in pairwise(wrapped):
        if len(cluster) > 1 and start + size > following:
            raise LayoutError(
                f"rank {rank.rank}, region '{region}': two slabs of page stride {stride} that lie among one another both have byte "
                f"{following % stride} of the stride; each byte belongs to one slab"
            )
