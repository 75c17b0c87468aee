"""What this engine remembers of its sources: their keys, and which leases it has given back. Size-bounded: the oldest are forgotten first."""

from __future__ import annotations

from collections import OrderedDict

from kvreshard.session.commands import RemoteEngine, RemoteLease
from kvreshard.session.seal import instance_id_of

# A source whose key was forgotten is asked again. Further choices of a request come together, and retries within minutes.
MAX_KEYS, MAX_SPENT = 4096, 10_000

Source = tuple[RemoteEngine, RemoteLease]


class KnownSources:
    """Of one decode engine. `own_key`: this engine's, under which it seals what it prefills."""

    def __init__(self, own_key: bytes | None = None) -> None:
        self._own = {instance_id_of(own_key): own_key} if own_key is not None else {}
        self._keys: OrderedDict[str, bytes] = OrderedDict()
        self._spent: OrderedDict[Source, None] = OrderedDict()

    def key_of(self, remote: RemoteEngine) -> bytes | None:
        """The key of an engine that was met; None if it is not known."""
        return self._own.get(remote.instance_id) or self._keys.get(remote.instance_id)

    def keep_key(self, key: bytes) -> None:
        """An engine with this key was met. An instance id follows from its key, so that a key serves no other engine."""
        self._keys[instance_id_of(key)] = key
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def is_spent(self, source: Source) -> bool:
        """Whether this engine has given the lease back."""
        return source in self._spent

    def spend(self, source: Source) -> None:
        """This engine gives the lease back."""
        self._spent[source] = None
        if len(self._spent) > MAX_SPENT:
            self._spent.popitem(last=False)
