"""The pace of engines whose compute and link are slower than this machine's (`paced`), and the file of what happened in them."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

PACE_FILE, EVENT_FILE = "KVRESHARD_BENCH_PACE", "KVRESHARD_BENCH_EVENTS"


@dataclass(frozen=True, slots=True)
class Pace:
    """Zero: as fast as it goes. `tells_layers`: progress is told by layer, not only by chunk."""

    seconds_per_token: float = 0.0
    link_bytes_per_s: float = 0.0
    tells_layers: bool = True

    def write(self, path: Path) -> None:
        """Set the paces of all engines that read this file."""
        path.with_suffix(".new").write_text(json.dumps(asdict(self)))
        path.with_suffix(".new").replace(path)

    @classmethod
    def read(cls) -> Pace:
        """As of now."""
        return cls(**json.loads(Path(os.environ[PACE_FILE]).read_text()))


def note(event: str, **details: object) -> None:
    """Append an event. All processes of a machine share the monotonic clock."""
    line = json.dumps({"event": event, "at_s": time.monotonic(), **details})
    with open(os.environ[EVENT_FILE], "a") as file:
        file.write(line + "\n")
