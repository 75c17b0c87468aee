"""Which hosts may be named as the source of a request (option `source_hosts`).

Host and port in `kv_transfer_params` come with a request and choose whom the ranks contact. An entry of the list is

- a network or an address, `10.0.0.0/8`, `fd00::/8` or `10.1.2.3`: allows addresses in it;
- a name, `prefill-0.example`, or `*.prefill.example` for all names below: allows that text.

Names are not looked up: what a name means may change between a check and the connection. So where engines announce themselves by name, names are listed.
Other ways to write an address (`127.1`, `0x7f000001`) are names that nobody lists. An empty list allows every host.

Refused with ValueError: an entry that is none of these.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable

from kvreshard.model.text import escaped

_NAME = re.compile(r"(\*\.)?[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?(\.[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?)*\Z")
Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class SourceHosts:
    """The hosts that `entries` allow.

    >>> hosts = SourceHosts(["10.0.0.0/8", "fd00::/8", "*.prefill.example"])
    >>> [hosts.allows(host) for host in ("10.1.2.3", "11.1.2.3", "fd00::1", "p0.prefill.example", "prefill.example")]
    [True, False, True, True, False]
    """

    def __init__(self, entries: Iterable[str] = ()) -> None:
        self._networks: list[Network] = []
        self._names: set[str] = set()
        self._domains: set[str] = set()
        self.entries = tuple(entries)
        for entry in self.entries:
            self._add(entry)

    @property
    def allows_all(self) -> bool:
        """Whether there is no list."""
        return not self.entries

    def allows(self, host: str) -> bool:
        """Whether the ranks may contact a host, an address or a name."""
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
                    f"source_hosts: '{escaped(entry, 80)}' is no network, address or name ; write for example '10.0.0.0/8', 'prefill-0.example' or "
                    "'*.prefill.example'"
                ) from None
            name = entry.lower()
            if name.startswith("*."):
                self._domains.add(name[1:])
            else:
                self._names.add(name)


def _read_address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that a host is, without its zone; an IPv4 address in IPv6 form is that address. None for a name."""
    try:
        address = ipaddress.ip_address(host.partition("%")[0] if ":" in host else host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address
