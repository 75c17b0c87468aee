"""Identity of a request's adapter (LoRA), so that two engines agree only on the same weights.

Each engine loads its adapters by itself, so one name may stand for other weights there, for example an older version. An adapter is
therefore identified by its name and a digest of

1. `adapter_config.json` and the file of weights that vLLM takes, with their sizes (`lora/lora_model.py`, `from_local_checkpoint`);
2. of files above a megabyte only pieces at equal distances, since a scheduler has no time to read gigabytes. Training changes
   all tensors; a change of few bytes between two pieces is not found;
3. the engine's settings for adapters: their dtype, the modules that get one, whether the towers of a multimodal model do.

A worker reads an adapter once, so its digest is computed once, at first use. With `load_inplace` a worker reads it again for each batch
(`lora/worker_manager.py`, `add_adapter`), and the digest is computed again when a file has changed. An adapter whose files this process cannot read is
identified by its name and path, as in vLLM's own prefix cache (`v1/core/kv_cache_utils.py`, `_gen_lora_extra_hash_keys`).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest

from kvreshard.model.logs import fields, get_logger

logger = get_logger(__name__)

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
WHOLE_BYTES = 1 << 20
# 64 pieces of a file of 400 MB that a worker has just read take less than a millisecond.
PIECES, PIECE_BYTES = 64, 4096
MAX_KNOWN = 10_000


class Adapters:
    """The adapters of one engine's requests. `settings`: the engine's settings for all of them."""

    def __init__(self, lora_config: Any = None) -> None:
        self.settings = _read_settings(lora_config)
        self._known: OrderedDict[tuple[Any, ...], str] = OrderedDict()

    def identify(self, lora: LoRARequest | None) -> str:
        """Name and digest of a request's adapter; empty without one."""
        if lora is None:
            return ""
        folder = Path(os.path.expanduser(lora.lora_path))
        stamps = _stamps(folder) if lora.load_inplace else ()
        key = (lora.lora_name, lora.lora_int_id, lora.lora_path, stamps)
        if key not in self._known:
            self._known[key] = self._digest(lora)
            if len(self._known) > MAX_KNOWN:
                self._known.popitem(last=False)
        return self._known[key]

    def _digest(self, lora: LoRARequest) -> str:
        digest = hashlib.blake2b(self.settings.encode(), digest_size=8)
        try:
            for path in _files(_find_folder(lora.lora_path)):
                _feed(digest, path)
        except OSError as error:
            logger.warning(
                "adapter '%s' cannot be read here (%s); it counts as another engine's adapter of the same name and path",
                *(lora.lora_name, error),
                extra=fields("adapter_unreadable", adapter=lora.lora_name),
            )
            digest = hashlib.blake2b(f"{self.settings} {lora.lora_path}".encode(), digest_size=8)
        found = f"{lora.lora_name} {digest.hexdigest()}"
        logger.info(
            "adapter '%s' of %s has digest %s",
            *(lora.lora_name, lora.lora_path, digest.hexdigest()),
            extra=fields("adapter_digest", adapter=lora.lora_name),
        )
        return found


def _read_settings(lora_config: Any) -> str:
    if lora_config is None:
        return ""
    modules = lora_config.target_modules
    return json.dumps(
        {
            "dtype": str(lora_config.lora_dtype),
            "modules": None if modules is None else sorted(modules),
            "towers": bool(lora_config.enable_tower_connector_lora),
        }
    )


def _find_folder(path: str) -> Path:
    """The folder where vLLM finds it (`lora/utils.py`, `get_adapter_absolute_path`), without network access. Raises OSError."""
    folder = Path(os.path.expanduser(path))
    if folder.exists() or folder.is_absolute():
        return folder
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(path, local_files_only=True))
    except ValueError as error:  # no name of a repository
        raise FileNotFoundError(f"no folder '{path}'") from error


def _files(folder: Path) -> list[Path]:
    """The files that vLLM reads. Raises OSError if one is missing."""
    weights = next((folder / name for name in WEIGHTS if (folder / name).is_file()), folder / WEIGHTS[0])
    return [folder / CONFIG, weights]


def _stamps(folder: Path) -> tuple[tuple[int, int], ...]:
    """Time of the last write and size of each file; empty if one cannot be read."""
    try:
        found = [path.stat() for path in _files(folder)]
    except OSError:
        return ()
    return tuple((state.st_mtime_ns, state.st_size) for state in found)


def _feed(digest: Any, path: Path) -> None:
    """Add a file to a digest: its size, and all of it or pieces, the first and the last among them. Raises OSError."""
    with path.open("rb") as file:
        size = path.stat().st_size
        digest.update(f"{path.name} {size} ".encode())
        if size <= WHOLE_BYTES:
            digest.update(file.read())
            return
        for number in range(PIECES):
            file.seek(number * (size - PIECE_BYTES) // (PIECES - 1))
            digest.update(file.read(PIECE_BYTES))
