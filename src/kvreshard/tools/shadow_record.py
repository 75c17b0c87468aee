"""A wrapper of NixlConnector's NIXL agent that records the transfers it posts.

Every call goes on to the agent unchanged. Descriptor lists are recorded when they are prepared. A transfer made from them while a request is
`current` is recorded as two index arrays; addresses are looked up when the load is compared.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvreshard.plan.copies import CopyList

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class DescriptorList:
    """A prepared list. `agent`: whose memory; `rows`: shape (n, 3) or wider, the first two are address and length."""

    agent: str
    rows: Int64s


@dataclass(frozen=True, slots=True, eq=False)
class PostedTransfer:
    """One transfer: indices into two descriptor lists, shapes (n,)."""

    local: DescriptorList
    local_index: Int64s
    remote: DescriptorList
    remote_index: Int64s

    def copies(self, src_rank: int, dst_rank: int) -> CopyList:
        """The transfer as copies. Raises ValueError if a pair of descriptors differs in length."""
        dst, src = self.local.rows[self.local_index], self.remote.rows[self.remote_index]
        if (dst[:, 1] != src[:, 1]).any():
            at = int(np.argmax(dst[:, 1] != src[:, 1]))
            raise ValueError(f"NixlConnector reads {src[at, 1]} bytes into a descriptor of {dst[at, 1]}")
        return CopyList(src_rank, dst_rank, src[:, 0], dst[:, 0], dst[:, 1])


class RecordingAgent:
    """See the module. `current`: the request that is being posted, or None."""

    def __init__(self, agent: Any) -> None:
        self._agent = agent
        # The last one: NixlConnector prepares each before it describes another.
        self._described: tuple[Any, Int64s] | None = None
        self._lists: dict[Any, DescriptorList] = {}
        self._posted: dict[str, list[PostedTransfer]] = {}
        self.current: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._agent, name)

    def get_xfer_descs(self, descs: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the rows behind the agent's own object."""
        made = self._agent.get_xfer_descs(descs, *args, **kwargs)
        self._described = made, np.asarray(descs, dtype=np.int64)
        return made

    def prep_xfer_dlist(self, agent_name: str, descs: Any, *args: Any, **kwargs: Any) -> Any:
        """Record the list under its handle."""
        handle = self._agent.prep_xfer_dlist(agent_name, descs, *args, **kwargs)
        if self._described is not None and self._described[0] is descs:
            self._lists[handle] = DescriptorList(agent_name, self._described[1])
            self._described = None
        return handle

    def make_prepped_xfer(
        self, operation: str, local: Any, local_index: Any, remote: Any, remote_index: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """Record the transfer."""
        if self.current is not None and local in self._lists and remote in self._lists:
            posted = PostedTransfer(
                self._lists[local],
                np.array(local_index, dtype=np.int64),
                self._lists[remote],
                np.array(remote_index, dtype=np.int64),
            )
            self._posted.setdefault(self.current, []).append(posted)
        return self._agent.make_prepped_xfer(operation, local, local_index, remote, remote_index, *args, **kwargs)

    def release_dlist_handle(self, handle: Any, *args: Any, **kwargs: Any) -> Any:
        """Drop the list."""
        self._lists.pop(handle, None)
        return self._agent.release_dlist_handle(handle, *args, **kwargs)

    def take(self, request: str) -> list[PostedTransfer]:
        """Remove and return what was posted for a request."""
        return self._posted.pop(request, [])
