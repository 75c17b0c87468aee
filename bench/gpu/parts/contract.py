"""Does NIXL pass the transport's whole contract where memory is a device's, on both sides and on one?"""

from __future__ import annotations

import contextlib
import io
import os
from typing import Any

import pytest

from bench.gpu.findings import Bench

# Ranks 0, 1 and 2 of the contract.
PLACES = {"device": "ddd", "device reads host": "dhd", "host reads device": "hdh"}
MAX_TOLD = 5


class _Outcomes:
    """A plugin of pytest that counts."""

    def __init__(self) -> None:
        self.passed, self.failed = 0, list[str]()

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" and report.passed:
            self.passed += 1
        elif report.failed:
            last = str(report.longrepr).strip().splitlines()[-1]
            self.failed.append(f"{report.nodeid.split('::')[-1]} ({report.when}): {last}")


def run(bench: Bench) -> None:
    """The suite once for each kind of pair; a rehearsal takes the first and a part of it."""
    for name, places in PLACES.items():
        if bench.is_rehearsal and places != "ddd":
            bench.skip(name, "the processor has one kind of memory")
            continue
        with bench.check(name) as found:
            outcomes = _Outcomes()
            os.environ["KVRESHARD_DEVICES"] = ",".join(bench.device if place == "d" else "cpu" for place in places)
            words = [
                "-q",
                "--maxfail=20",
                "-p",
                "no:cacheprovider",
                "-c",
                os.devnull,
                "--rootdir",
                ".",
            ]
            words += ["-k", "random_pieces or removed_peer or payloads"] if bench.is_rehearsal else []
            told = io.StringIO()
            with contextlib.redirect_stdout(told):
                pytest.main([*words, "bench/gpu/contract_suite.py"], plugins=[outcomes])
            print(told.getvalue()[-6000:])
            found.figure(passed=outcomes.passed, failed=len(outcomes.failed))
            if outcomes.failed or not outcomes.passed:
                found.fail("; ".join(outcomes.failed[:MAX_TOLD]) or told.getvalue()[-500:])
