"""One target under atheris: `python -m tests.fuzz.covered TARGET [libFuzzer's arguments]`. Only our own code is instrumented."""

from __future__ import annotations

import sys

import atheris

with atheris.instrument_imports(include=["kvreshard"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    chosen = TARGETS[sys.argv[1]]

    def once(data: bytes) -> None:
        chosen(data)

    atheris.Setup([sys.argv[0], *sys.argv[2:]], once)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
