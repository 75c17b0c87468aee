"""Deliberate breaks of what matters most, each of which named tests must notice.

    python -m tests.mutants               all of them; `make mutants` does this
    python -m tests.mutants lease seal    those whose name or target has one of the words

A break replaces one function or method by its name, never by its source line, so that code can be rewritten freely. Its tests run in a
process of their own, with this file as a pytest plugin that applies the break. First all named tests must pass unbroken.

Exits with 1 if a break goes unnoticed, or its tests stop for another reason than a failure. This list is short on purpose. For a survey of a
whole file, run a mutation tool by hand: `pip install mutmut` (or `cosmic-ray`) into an environment of your own.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHOSEN = "KVRESHARD_MUTANT"
TIMEOUT_S = 120
FAILED = 1  # of pytest's exit codes the one that means that a test failed


@dataclass(frozen=True)
class Break:
    """`target`, "module:name" or "module:Class.name" inside `kvreshard`, becomes `make(what it was)`; one of `tests` must fail."""

    name: str
    target: str
    make: Callable[[Any], Any]
    tests: str

    def find(self) -> tuple[Any, str]:
        """The object that has the target, and the name it has it under. Raises AttributeError or ImportError if it is gone."""
        module, _, path = self.target.partition(":")
        *owners, name = path.split(".")
        holder: Any = importlib.import_module(f"kvreshard.{module}")
        for owner in owners:
            holder = getattr(holder, owner)
        getattr(holder, name)
        return holder, name

    def apply(self) -> None:
        """Break the code of this process."""
        holder, name = self.find()
        setattr(holder, name, self.make(getattr(holder, name)))


def returns(value: Any) -> Callable[[Any], Any]:
    """A function that does nothing and returns `value`."""
    return lambda _: lambda *args, **kwargs: value


def is_always(value: Any) -> Callable[[Any], Any]:
    """A property, or a constant of a class."""
    return lambda _: property(lambda _: value)


def overlooks(text: str) -> Callable[[Any], Any]:
    """A generator of findings that leaves out those with `text`, and returns what it returned."""

    def make(find: Any) -> Any:
        def found(*args: Any) -> Generator[str, None, Any]:
            findings = find(*args)
            while True:
                try:
                    finding = next(findings)
                except StopIteration as end:
                    return end.value
                if text not in finding:
                    yield finding

        return found

    return make


def _nothing_awaited(_: Any) -> Any:
    def settled(transfer: Any) -> Generator[Any, None, Any]:
        return transfer.error
        yield

    return settled


def _no_word_read(_: Any) -> Any:
    def check_words(*_: Any) -> Generator[Any, None, None]:
        return None
        yield

    return check_words


def _word_first(pull_steps: Any) -> Any:
    """The lease words are read before the data."""
    from kvreshard.session import pull

    def steps(
        mover: Any, route: Any, request: Any, dst: Any, lease: Any, note: Any, tell: Any
    ) -> Generator[Any, Any, Any]:
        error = yield from pull.check_words(mover, lease, route.src_ranks, note)
        if error is not None:
            raise error
        return (yield from pull_steps(mover, route, request, dst, None, note, tell))

    return steps


def _word_stays(end: Any) -> Any:
    """A lease ends and its word still stands."""

    def keep_word(book: Any, request: str, *cause: Any) -> None:
        lease = book._leases[request]
        end(book, request, *cause)
        book._table[lease.slot] = lease.word

    return keep_word


def _any_word(take: Any) -> Any:
    """A report with any word is taken."""
    from kvreshard.model.changed import replace

    def taken(book: Any, report: Any) -> None:
        lease = book._leases.get(report.request)
        take(book, report if lease is None else replace(report, word=lease.word))

    return taken


def _first_reporter(take: Any) -> Any:
    """A lease ends with its first report."""
    from kvreshard.model.changed import replace

    return lambda book, report: take(book, replace(report, reporters=(report.reporter,)))


def _not_quarantined(failure: Any) -> Any:
    return lambda kind, text, **_: failure(kind, text)


def _half_the_tables(code: Any) -> Any:
    """The seal does not cover block tables."""
    return lambda key, source, lease, tables, facts: code(key, source, lease, {}, facts)


PROOF, LEASE, TRANSFER = (
    "tests/unit/plan/test_match_prove.py",
    "tests/unit/session/test_lease.py",
    "tests/unit/session/test_transfer.py",
)
EARLY, EARLY_AT_RANDOM = "tests/unit/session/test_early_reads.py", "tests/property/test_early.py"
REQUEST, SESSION = "tests/unit/plan/test_request_refusals.py", "tests/unit/session/test_endpoint.py"
LAYOUTS = "tests/unit/model/test_layout_refusals.py"


def _any_lease(_: Any) -> Any:
    def write(self: Any, slots: Any, _leases: Any, words: Any) -> None:
        self._table.progress[slots] = words

    return write


def _one_layer_more(unpack: Any) -> Any:
    def more(word: int) -> Any:
        found = unpack(word)
        return found._replace(num_layers=found.num_layers + 1)

    return more


BREAKS = (
    Break("proof: two sources write one cell", "plan.check:_cover_faults", overlooks("both write"), PROOF),
    Break("proof: a cell has no source", "plan.check:_cover_faults", overlooks("a hole"), PROOF),
    Break("proof: a source gives what it does not hold", "plan.check:_cover_faults", overlooks("holds only"), PROOF),
    Break("proof: a copy leaves its region", "plan.check:_place_faults", overlooks("out of bounds"), PROOF),
    Break("proof: a copy begins elsewhere", "plan.check:_place_faults", overlooks("first cell"), PROOF),
    Break("request: page ids are not looked at", "plan.request_check:_check_inside", returns(None), REQUEST),
    Break("request: a page is written twice", "plan.request_check:_check_once", returns(None), REQUEST),
    Break("request: a state of another moment", "plan.request_check:_check_state", returns(None), REQUEST),
    Break("lease: its word is not read", "session.pull:check_words", _no_word_read, SESSION),
    Break("lease: its word is read first", "session.job:pull_steps", _word_first, SESSION),
    Break("lease: its word stays at the end", "session.lease:LeaseBook._end", _word_stays, LEASE),
    Break("lease: never runs out", "session.lease:LeaseBook.expire", returns(None), LEASE),
    Break("lease: a report may have any word", "session.lease:LeaseBook.report", _any_word, LEASE),
    Break("lease: ends with its first reporter", "session.lease:LeaseBook.report", _first_reporter, LEASE),
    Break("early: a word is not cleared at once", "session.progress:ProgressBoard.take_back", returns(None), EARLY),
    Break("early: progress of a lease that has gone", "session.progress:ProgressBoard._write", _any_lease, EARLY),
    Break(
        "early: what was read of a former life stays",
        "session.early_job:_Cursors.forget",
        returns(None),
        EARLY_AT_RANDOM,
    ),
    Break("early: one layer too many is final", "session.progress:Progress.unpack", _one_layer_more, EARLY_AT_RANDOM),
    Break("early: the lease word is not read at the end", "session.early_job:check_words", _no_word_read, EARLY),
    Break("early: a statement is not checked", "session.statement:Statement.check", returns(None), EARLY),
    Break("settle: a load does not wait for its reads", "session.pull:settled", _nothing_awaited, TRANSFER),
    Break("settle: pages are freed while reads move", "session.job:Job.is_settled", is_always(True), SESSION),
    Break("quarantine: what does not settle is reused", "session.job:Failure", _not_quarantined, SESSION),
    Break("seal: not checked", "session.job:Job._check_seal", returns(None), "tests/unit/session/test_forged.py"),
    Break("seal: does not cover the tables", "session.seal:_code", _half_the_tables, "tests/unit/session/test_seal.py"),
    Break("new pages are not zeroed", "session.mover:Mover.fill", returns(0), TRANSFER),
    Break(
        "window: has no bound",
        "transport.posting:Windows.is_open",
        returns(True),
        "tests/unit/transport/test_window.py",
    ),
    Break(
        "window: counts nothing",
        "transport.posting:Windows.enter",
        returns(None),
        "tests/unit/transport/test_window.py",
    ),
    Break(
        "decoding: lists of any length together",
        "model.wire:_check_sizes",
        returns(None),
        "tests/unit/plan/test_bounds.py",
    ),
    Break(
        "decoding: names with line breaks",
        "model.wire:check_names",
        returns(None),
        "tests/unit/model/test_wire_refusals.py",
    ),
    Break("layout: regions share bytes", "model.layout_check:_check_regions", returns(None), LAYOUTS),
    Break("layout: cells lie outside their slabs", "model.layout_check:_check_places", returns(None), LAYOUTS),
)


def pytest_configure() -> None:
    """Apply the chosen break: this file is a plugin of the processes that it starts."""
    chosen = os.environ.get(CHOSEN)
    if chosen is not None:
        next(one for one in BREAKS if one.name == chosen).apply()


def run_tests(tests: Sequence[str], chosen: str | None = None) -> tuple[int, str]:
    """Pytest's exit code with one break, or none, and what failed first."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "--no-header",
        "-p",
        "no:cacheprovider",
        "-p",
        "tests.mutants",
        *tests,
    ]
    environment = {**os.environ} | ({CHOSEN: chosen} if chosen else {})
    environment.pop("KVRESHARD_RESULTS", None)
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return FAILED, f"no end within {TIMEOUT_S} s"
    lines = done.stdout.splitlines()
    return done.returncode, next((line for line in lines if line.startswith(("FAILED", "ERROR"))), "".join(lines[-1:]))


def main(words: Sequence[str]) -> int:
    """Try the breaks; the exit code."""
    chosen = [one for one in BREAKS if not words or any(word in f"{one.name} {one.target}" for word in words)]
    code, told = run_tests(sorted({one.tests for one in chosen}))
    if code or not chosen:
        print(f"the tests fail without a break: {told}" if code else f"no break has one of {', '.join(words)}")
        return 1
    num_noticed = 0
    for one in chosen:
        started_s = time.monotonic()
        code, told = run_tests([one.tests], one.name)
        num_noticed += code == FAILED
        print(
            f"{'noticed' if code == FAILED else 'UNNOTICED'} {time.monotonic() - started_s:5.1f} s  {one.name}: {told[:120]}",
            flush=True,
        )
    print(f"{num_noticed} of {len(chosen)} breaks noticed")
    return 0 if num_noticed == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
