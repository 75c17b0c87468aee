"""Prefill engines as a decode engine knows them: which hosts requests may name, the engines' keys, and the leases already released.

Host and port in `kv_transfer_params` come with a request and choose whom the ranks contact. Option `source_hosts` lists the hosts that
are allowed. An entry is

- a network or an address, `10.0.0.0/8`, `fd00::/8` or `10.1.2.3`: allows addresses in it;
- a name, `prefill-0.example`, or `*.prefill.example` for all names below it: allows that text.

Names are not resolved: the answer could change between the check and the connection. Where engines announce themselves by name, list
names. Other ways to write an address (`127.1`, `0x7f000001`) count as names. An empty list allows every host.
"""

from __future__ import annotations

import ipaddress
import re
from collections import OrderedDict
from collections.abc import Iterable

from kvreshard.model.text import escaped
from kvreshard.session.commands import RemoteEngine
from kvreshard.session.lease import Lease
from kvreshard.session.seal import instance_id_of

_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\Z")
# A source whose key was forgotten is asked for it again. Choices of one request arrive together, and retries within minutes.
MAX_KEYS, MAX_RELEASED = 4096, 10_000

Source = tuple[RemoteEngine, Lease]
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class SourceHosts:
    """The hosts that `entries` allow. Raises ValueError for an entry that is no network, address or name.

    >>> hosts = SourceHosts(["10.0.0.0/8", "fd00::/8", "*.prefill.example"])
    >>> [hosts.allows(host) for host in ("10.1.2.3", "11.1.2.3", "fd00::1", "p0.prefill.example", "prefill.example")]
    [True, False, True, True, False]
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._networks: list[Network] = []
        self._names: set[str] = set()
        self._domains: set[str] = set()
        for entry in entries:
            self._add(entry)
        self.allows_all = not (self._networks or self._names or self._domains)

    def allows(self, host: str) -> bool:
        """Whether the ranks may contact a host, given as an address or a name."""
        if self.allows_all:
            return True
        address = _read_address(host)
        if address is not None:
            return any(address in network for network in self._networks)
        name = host.lower().rstrip(".")
        return name in self._names or any(name.endswith(domain) for domain in self._domains)

    def _add(self, entry: str) -> None:
        try:
            self._networks.append(ipaddress.ip_network(entry))
        except ValueError:
            if not _NAME.match(entry) or re.fullmatch(r"[0-9./]+", entry):
                raise ValueError(
                    f"source_hosts: '{escaped(entry, 80)}' is no network, address or name; write for example '10.0.0.0/8', 'prefill-0.example' or "
                    "'*.prefill.example'"
                ) from None
            name = entry.lower()
            if name.startswith("*."):
                self._domains.add(name[1:])
            else:
                self._names.add(name)


class KnownSources:
    """Size-bounded memory of one decode engine; the oldest entries go first.

    `own_key`: the key under which it seals its own prefills. Its instance id is a digest of that.
    """

    def __init__(self, engine: str, own_key: bytes) -> None:
        self._engine = engine
        self.begin_instance(own_key)
        self._keys: OrderedDict[str, bytes] = OrderedDict()
        self._released: OrderedDict[Source, None] = OrderedDict()

    def begin_instance(self, own_key: bytes) -> None:
        """This engine has another key and instance id from now on."""
        self._own_key, self._own_id = own_key, instance_id_of(own_key)

    def is_own(self, remote: RemoteEngine) -> bool:
        """Whether the source is this very engine."""
        return remote.name == (self._engine, self._own_id)

    def find_key(self, remote: RemoteEngine) -> bytes | None:
        """The engine's key; None if it is not known."""
        return self._own_key if remote.instance_id == self._own_id else self._keys.get(remote.instance_id)

    def add_key(self, key: bytes) -> None:
        """Keep the key of an engine after its handshake. The instance id is a digest of the key, so a key serves no other engine."""
        self._keys[instance_id_of(key)] = key
        if len(self._keys) > MAX_KEYS:
            self._keys.popitem(last=False)

    def is_released(self, source: Source) -> bool:
        """Whether this engine has released the lease."""
        return source in self._released

    def add_released(self, source: Source) -> None:
        """This engine releases the lease."""
        self._released[source] = None
        if len(self._released) > MAX_RELEASED:
            self._released.popitem(last=False)


def _read_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is, without its zone; an IPv4 address in IPv6 form is that address. None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0] if ":" in host else host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
