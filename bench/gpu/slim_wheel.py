"""Leaves folders out of a wheel: `slim_wheel.py WHEEL FOLDER/ ...` rewrites it in place, its RECORD included."""

from __future__ import annotations

import sys
import zipfile
from pathlib import Path


def slim(wheel: Path, folders: tuple[str, ...]) -> int:
    """Rewrite the wheel without the folders; returns the bytes saved. Raises ValueError where nothing lies in one of them."""
    thin = wheel.with_suffix(".part")
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(thin, "w", zipfile.ZIP_DEFLATED) as new:
        names = old.namelist()
        for folder in folders:
            if not any(name.startswith(folder) for name in names):
                raise ValueError(
                    f"{wheel.name} has nothing in {folder}; it has: {sorted({n.split('/')[0] for n in names})}"
                )
        for entry in old.infolist():
            if entry.filename.startswith(folders):
                continue
            content = old.read(entry)
            if entry.filename.endswith(".dist-info/RECORD"):
                lines = content.decode().splitlines(keepends=True)
                content = "".join(line for line in lines if not line.startswith(folders)).encode()
            new.writestr(entry, content)
    saved = wheel.stat().st_size - thin.stat().st_size
    thin.replace(wheel)
    return saved


if __name__ == "__main__":
    slim(Path(sys.argv[1]), tuple(sys.argv[2:]))
