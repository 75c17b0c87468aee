"""Errors that all transports word alike."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from kvreshard.transport.base import Transfer, TransportError


def unknown_peer(own_name: str, peer: str, known: Iterable[str]) -> TransportError:
    """A peer that was never added, or was removed."""
    names = ", ".join(sorted(repr(name) for name in known)) or "none"
    return TransportError(
        f"peer {peer!r} is unknown to transport {own_name!r}; its peers are: {names}; call add_peer with the metadata"
    )


def cancelled(transfer: Transfer) -> TransportError:
    """The end of a transfer whose poster no longer wants it."""
    return TransportError(f"{transfer.direction.value} with peer {transfer.peer!r} was cancelled")


def closed_transport(own_name: str) -> TransportError:
    """Use after close."""
    return TransportError(f"transport {own_name!r} is closed; make a new one and exchange metadata again")


def closed_while_pending(own_name: str) -> TransportError:
    """The end of a transfer that close gave up."""
    return TransportError(f"transport {own_name!r} was closed while this transfer was pending; post it again elsewhere")


def torn_peer(peer_name: str) -> TransportError:
    """The end of a transfer with a peer that another's failure has disconnected."""
    return TransportError(
        f"peer {peer_name} was disconnected since a transfer with it failed; remove it and add it again"
    )


def failed(transfer: Transfer, peer_name: str, error: Exception) -> TransportError:
    """The end of a transfer of which a slice has failed, or its last word."""
    reason = str(error)
    if not isinstance(error, TransportError):
        reason = f"{type(error).__name__} {reason}".strip()
    return TransportError(
        f"{transfer.direction.value} of {transfer.num_bytes} bytes with peer {transfer.peer!r} ({peer_name}) failed: {reason}; if the "
        "peer is gone, remove it and add its successor"
    )


def check_new_peers(
    own_name: str, fresh: Mapping[str, str], known: Mapping[str, tuple[str, object]], aliases: Mapping[str, str]
) -> None:
    """Raise unless all of the fresh peers are new, by their own names and by ours. `fresh` maps the names here to the peers' own. Of those
    known, `known` maps the names here to (their own, ...), `aliases` their own to those here.
    """
    added: dict[str, str] = {}
    for alias, peer_name in fresh.items():
        if peer_name == own_name:
            raise TransportError(f"peer {alias!r} is transport {own_name!r} itself; copy local memory directly")
        ours = aliases.get(peer_name) or added.get(peer_name)
        if ours is not None:
            raise TransportError(
                f"peer {alias!r} ({peer_name}) is known already as {ours!r}; remove_peer it first to refresh it"
            )
        if alias in known:
            raise TransportError(
                f"peer name {alias!r} belongs to {known[alias][0]}, now offered {peer_name}; remove_peer the old one first"
            )
        added[peer_name] = alias
