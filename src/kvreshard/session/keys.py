"""CURVE keys of the handshakes: this engine's pair and the public keys that it trusts.

Each side encrypts with its pair and knows the public keys of those that it trusts. One pair copied to all engines of a fleet is enough; a pair
per engine and a directory of public keys allow to remove a single one, and to change keys without a stop. Key files are those of pyzmq
(`zmq.auth`): `NAME.key_secret` holds both keys, `NAME.key` the public one. pyzmq is imported when a file is read or written: commands that
need no keys work without it.
"""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType

from kvreshard.model.errors import KvReshardError

KEY_CHARACTERS = 40
# A peer may have any of them: each is tried in turn, in some milliseconds.
MAX_PEER_KEYS = 256


@dataclass(frozen=True, slots=True)
class Keys:
    """In Z85 text. `trusted`: the public keys of all engines that are trusted, its own among them."""

    public: bytes
    secret: bytes = field(repr=False)
    trusted: tuple[bytes, ...]


def read_keys(secret_file: Path, public_dir: Path | None = None) -> Keys:
    """The keys of an engine. `public_dir`: its `.key` files are trusted too.

    Raises KvReshardError with the path for files that are missing or hold no key, and for a secret that others may read.
    """
    public, secret = _read_file(secret_file)
    if secret is None:
        raise KvReshardError(
            f"key file {secret_file} has no secret key; `kvreshard keys` writes one that ends in .key_secret"
        )
    if stat.S_IMODE(secret_file.stat().st_mode) & 0o077:
        raise KvReshardError(
            f"key file {secret_file} may be read by others; make it yours alone: chmod 600 {secret_file}"
        )
    others: list[bytes] = []
    if public_dir is not None:
        others = [_read_file(path)[0] for path in _find_public(public_dir)]
    trusted = tuple(dict.fromkeys([public, *others]))
    if len(trusted) > MAX_PEER_KEYS:
        raise KvReshardError(f"{public_dir} holds {len(trusted)} keys; more than {MAX_PEER_KEYS} are not accepted")
    return Keys(public, secret, trusted)


def write_keys(directory: Path, name: str) -> tuple[Path, Path]:
    """Make a key pair: (`NAME.key`, `NAME.key_secret`), the latter for its owner only. Raises KvReshardError if one exists."""
    auth = _import_auth()
    public_file, secret_file = directory / f"{name}.key", directory / f"{name}.key_secret"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        # Written in a private directory, so that others can read the secret at no time, then linked without overwriting.
        with tempfile.TemporaryDirectory(dir=directory, prefix=".keys-") as private:
            made = [Path(path) for path in auth.create_certificates(private, name)]
            made[0].chmod(0o644)
            made[1].chmod(0o600)
            os.link(made[1], secret_file)
            try:
                os.link(made[0], public_file)
            except OSError:
                secret_file.unlink()
                raise
    except FileExistsError as error:
        if not directory.is_dir():
            raise KvReshardError(
                f"{directory} is a file; name the directory that the keys are to be written to"
            ) from error
        raise KvReshardError(f"there is a key {name!r} in {directory} already; choose another name") from error
    except OSError as error:
        raise KvReshardError(
            f"cannot write keys to {directory}: {error.strerror}; name a directory that you may write to"
        ) from error
    return public_file, secret_file


def _import_auth() -> ModuleType:
    """ZeroMQ's key files. Raises KvReshardError where pyzmq is not installed."""
    try:
        from zmq import auth
    except ModuleNotFoundError as error:
        raise KvReshardError(f"keys need pyzmq ({error}); pip install pyzmq") from error
    return auth


def _find_public(directory: Path) -> list[Path]:
    """The `.key` files of a directory. Raises KvReshardError if it cannot be listed: `Path.glob` would find none in it."""
    try:
        return sorted(path for path in directory.iterdir() if path.name.endswith(".key"))
    except OSError as error:
        raise KvReshardError(
            f"{directory} is not a directory that can be read ({error.strerror}); it should hold the .key files of the engines to trust"
        ) from error


def _read_file(path: Path) -> tuple[bytes, bytes | None]:
    auth = _import_auth()
    from zmq.utils import z85

    try:
        path.stat()  # pyzmq says of any file that it cannot open only that it is invalid
        public, secret = auth.load_certificate(path)
    except FileNotFoundError as error:
        raise KvReshardError(
            f"there is no key file {path}; check the path, or make a pair with `kvreshard keys`"
        ) from error
    except (OSError, ValueError) as error:
        raise KvReshardError(f"cannot read a key from {path}: {error}; `kvreshard keys` writes key files") from error
    for key in (public, secret):
        decoded = b""
        with contextlib.suppress(KeyError, ValueError):
            decoded = z85.decode(key) if key is not None else bytes(32)
        if len(decoded) != 32:
            raise KvReshardError(
                f"{path} holds a key that is not {KEY_CHARACTERS} characters of Z85; was the file damaged?"
            )
    return public, secret
