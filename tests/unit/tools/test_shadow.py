"""Does the shadow write down what an agent is asked to post, and is each verdict about the right bytes?"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from tests.pairs.small import GROUP, engine, request

from kvreshard.kinds import Attention
from kvreshard.model import EngineLayout, LayoutError
from kvreshard.plan import bind, compile_route
from kvreshard.plan.copies import CopyList
from kvreshard.session.commands import Load, RemoteEngine
from kvreshard.session.engine_metadata import EngineMetadata, RankMetadata, make_engine_metadata
from kvreshard.session.handshake_messages import Address, HandshakeError
from kvreshard.session.handshake_server import HandshakeServer
from kvreshard.session.lease import Lease
from kvreshard.session.seal import Seal
from kvreshard.tools import shadow
from kvreshard.tools.shadow import EndedLoad, ShadowJudge, ShadowLoad
from kvreshard.tools.shadow_record import DescriptorList, RecordingAgent
from kvreshard.tools.shadow_report import ShadowReport, compare_load

HEADS = Attention(4, 16, "bfloat16")
INTERIORS = {"request": "r", "peer": "p", "rank": 0}


class Agent:
    """As much of a NIXL agent as NixlConnector asks for."""

    def __init__(self) -> None:
        self.posted: list[Any] = []

    def get_xfer_descs(self, descs: Any, memory: str) -> object:
        return object()

    def prep_xfer_dlist(self, agent: str, descs: object) -> str:
        return f"handle of {agent}"

    def make_prepped_xfer(self, *args: Any, **kwargs: Any) -> int:
        self.posted.append((args, kwargs))
        return 7

    def release_dlist_handle(self, handle: str) -> None:
        pass


def prepared(agent: RecordingAgent, name: str, rows: list[list[int]]) -> Any:
    return agent.prep_xfer_dlist(name, agent.get_xfer_descs(np.array(rows), "DRAM"))


def test_what_is_posted_is_noted_for_the_current_request_only() -> None:
    inner = Agent()
    agent = RecordingAgent(inner)
    local = prepared(agent, "NIXL_INIT_AGENT", [[100, 8, 0], [200, 8, 0], [300, 8, 0]])
    remote = prepared(agent, "peer", [[1000, 8, 0], [2000, 8, 0]])
    assert agent.make_prepped_xfer("READ", local, [2, 0], remote, [0, 1], notif_msg=b"x") == 7
    assert agent.take("r") == []
    agent.current = "r"
    agent.make_prepped_xfer("READ", local, [2, 0], remote, np.array([0, 1]), notif_msg=b"x")
    assert len(inner.posted) == 2
    (posted,) = agent.take("r")
    copies = posted.copies(3, 5)
    assert (copies.src_rank, copies.dst_rank, posted.remote.agent) == (3, 5, "peer")
    assert (copies.src_address.tolist(), copies.dst_address.tolist()) == ([1000, 2000], [300, 100])
    assert agent.take("r") == []
    agent.release_dlist_handle(local)
    agent.make_prepped_xfer("READ", local, [0], remote, [0])
    assert agent.take("r") == []


def test_descriptors_of_different_length_cannot_be_copies() -> None:
    agent = RecordingAgent(Agent())
    local, remote = prepared(agent, "me", [[100, 8, 0]]), prepared(agent, "peer", [[1000, 4, 0]])
    agent.current = "r"
    agent.make_prepped_xfer("READ", local, [0], remote, [0])
    with pytest.raises(ValueError, match="reads 4 bytes into a descriptor of 8"):
        agent.take("r")[0].copies(0, 0)


@pytest.fixture
def pair() -> tuple[EngineLayout, EngineLayout]:
    """Four ranks that hold two heads twice each, and one that holds all."""
    kind = Attention(2, 16, "bfloat16")
    return engine("prefill", tp=4, kind=kind), engine("decode", tp=1, kind=kind)


def report(
    src: EngineLayout, dst: EngineLayout, theirs: list[CopyList], num_tokens: int = 10, pages: list[int] | None = None
) -> ShadowReport:
    asked = request(src, dst, num_tokens, dst_pages=pages)
    load = Load(
        "r",
        RemoteEngine("prefill", "life", Address("h", 1)),
        Lease("q", 0, 1),
        asked,
        Seal(b"", b""),
        gives_back=True,
    )
    return compare_load(load, compile_route(src, dst, 0), src, dst, theirs, INTERIORS)


def ours(src: EngineLayout, dst: EngineLayout, num_tokens: int = 10) -> list[CopyList]:
    return list(bind(compile_route(src, dst, 0), request(src, dst, num_tokens)))


def test_the_same_bytes(pair: tuple[EngineLayout, EngineLayout]) -> None:
    found = report(*pair, ours(*pair))
    assert (found.verdict, found.same_bytes) == ("same", found.num_bytes)
    assert found.num_bytes == 10 * 2 * 2 * 16 * 2


def test_replicas_that_we_would_not_have_read_are_as_good(pair: tuple[EngineLayout, EngineLayout]) -> None:
    src, dst = pair
    elected = set(compile_route(src, dst, 0).src_ranks)
    others = EngineLayout(
        src.engine, src.fields, src.groups, tuple(rank for rank in src.ranks if rank.rank not in elected)
    )
    found = report(src, dst, ours(others, dst))
    assert (found.verdict, found.elsewhere_bytes) == ("same", 0)


def test_more_missing_and_elsewhere(pair: tuple[EngineLayout, EngineLayout]) -> None:
    assert report(*pair, ours(*pair, num_tokens=12)).verdict == "more"
    less = report(*pair, ours(*pair, num_tokens=9))
    assert (less.verdict, less.missing_bytes) == ("missing", 2 * 2 * 16 * 2)
    shifted = [CopyList(c.src_rank, 0, c.src_address + 2, c.dst_address, c.length) for c in ours(*pair)]
    wrong = report(*pair, shifted)
    assert (wrong.verdict, wrong.elsewhere_bytes, wrong.first_elsewhere is None) == ("differs", wrong.num_bytes, False)
    assert "differs" in wrong.sentence()


def test_refused_on_either_side_and_what_cannot_be_said(pair: tuple[EngineLayout, EngineLayout]) -> None:
    assert report(*pair, []).verdict == "refused there"
    here = report(*pair, ours(*pair), pages=[1, 1, 2])
    assert here.verdict == "refused here"
    assert GROUP in here.reason
    twice = report(*pair, [*ours(*pair), *ours(*pair)])
    assert (twice.verdict, "two copies write" in twice.reason) == ("unknown", True)


@pytest.fixture
def judged(
    pair: tuple[EngineLayout, EngineLayout], tmp_path: Path
) -> Iterator[tuple[ShadowJudge, HandshakeServer, Callable[[int], list[dict[str, Any]]]]]:
    """A judge of the destination, the source's listener, and the reports once there are so many."""
    src, dst = pair
    file, listener = tmp_path / "reports", HandshakeServer(Address("127.0.0.1", 0), metadata_of(src))
    judge = ShadowJudge(dst.engine, handshake_timeout_s=5.0, report_file=str(file))
    judge.introduce(metadata_of(dst))

    def reports(number: int) -> list[dict[str, Any]]:
        deadline_s = time.monotonic() + 60.0
        while not (file.exists() and file.read_text().count("\n") >= number) and time.monotonic() < deadline_s:
            time.sleep(0.002)
        return [msgspec.json.decode(line) for line in file.read_bytes().splitlines()]

    yield judge, listener, reports
    judge.close()
    listener.close()


def metadata_of(layout: EngineLayout) -> EngineMetadata:
    return make_engine_metadata(
        layout, bytes(32), {"model": "m"}, [RankMetadata(rank.rank, b"", 0, 0) for rank in layout.ranks], 30.0
    )


class Done:
    """What NixlConnector posted, as copies."""

    def __init__(self, agent: str, copies: CopyList) -> None:
        self.remote, self._copies = DescriptorList(agent, np.zeros((0, 3), np.int64)), copies

    def copies(self, src_rank: int, dst_rank: int) -> CopyList:
        assert (src_rank, dst_rank) == (self._copies.src_rank, self._copies.dst_rank)
        return self._copies


def ended(pair: tuple[EngineLayout, EngineLayout], address: Address, **changes: Any) -> EndedLoad:
    """A load of all heads that NixlConnector carried out as the planner would have."""
    src, dst = pair
    wanted = request(src, dst, 13)
    remote = RemoteEngine(src.engine, metadata_of(src).instance_id, address)
    load = Load("r", remote, Lease("s", 0, 1), wanted, Seal(b"", b""), gives_back=True)
    posted = [Done(f"agent {copies.src_rank}", copies) for copies in bind(compile_route(src, dst, 0), wanted)]
    agents = {f"agent {rank.rank}": (dict(rank.place)["pp"], dict(rank.place)["tp"]) for rank in src.ranks}
    made = EndedLoad(ShadowLoad(load, "r", 13, 13), posted, agents, is_failed=False, rearranges=False)  # type: ignore[arg-type]
    return dataclasses.replace(made, **changes)


def test_a_load_is_judged_by_the_route_from_the_source_that_is_met(judged: Any, pair: Any) -> None:
    judge, listener, reports = judged
    same = ended(pair, listener.address)
    judge.submit(same)
    judge.submit(dataclasses.replace(same, load=dataclasses.replace(same.load, lost="token 12 looks at token 1")))
    judge.submit(dataclasses.replace(same, is_failed=True))
    judge.submit(dataclasses.replace(same, agents={}))
    found = reports(4)
    assert [report["verdict"] for report in found] == ["same", "missing", "refused there", "unknown"]
    assert found[0]["same_bytes"] == found[0]["num_bytes"] == found[0]["their_bytes"] > 0
    assert found[1]["reason"] == "token 12 looks at token 1"


def test_a_source_that_does_not_answer_once_is_asked_again(
    judged: Any, pair: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And that it is not told how the comparison went is no reason to compare nothing."""
    judge, listener, reports = judged
    fetch, errors = shadow.fetch_engine_metadata, [HandshakeError("it is slow")]

    def fetch_late(*given: Any) -> EngineMetadata:
        if errors:
            raise errors.pop()
        return fetch(*given)

    def send(*given: Any) -> None:
        raise HandshakeError("it takes no outcome")

    monkeypatch.setattr(shadow, "fetch_engine_metadata", fetch_late)
    monkeypatch.setattr(shadow, "send_outcome", send)
    monkeypatch.setattr(shadow, "RETRY_S", 0.0)
    for _ in range(2):
        judge.submit(ended(pair, listener.address))
    first, second = reports(2)
    assert (first["verdict"], first["reason"]) == ("unknown", "it is slow")
    assert second["verdict"] == "same"


@pytest.mark.parametrize("error", [HandshakeError("nobody there"), LayoutError("another model")])
def test_sources_that_come_and_go_are_forgotten(
    judged: Any, pair: Any, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    judge, listener, reports = judged
    asked = []

    def fetch(address: Address, *given: Any) -> EngineMetadata:
        asked.append(address.port)
        raise error

    monkeypatch.setattr(shadow, "fetch_engine_metadata", fetch)
    monkeypatch.setattr(shadow, "MAX_KNOWN", 2)
    good = ended(pair, listener.address)
    for port in (1, 2, 2, 3, 3, 2, 1, 1):
        load = good.load.load
        remote = dataclasses.replace(load.remote, engine=f"prefill {port}", address=Address("127.0.0.1", port))
        judge.submit(
            dataclasses.replace(
                good, load=dataclasses.replace(good.load, load=dataclasses.replace(load, remote=remote))
            )
        )
    assert {report["reason"] for report in reports(8)} == {str(error)}
    assert asked == [1, 2, 3, 1]  # the two that were met last are known
    assert len(judge._counts) == 2


def test_what_this_connector_would_not_load_is_told_with_the_reason(judged: Any, pair: Any) -> None:
    judge, listener, reports = judged
    listener.close()  # nobody answers any more
    good = ended(pair, listener.address)
    judge.submit(dataclasses.replace(good, load=dataclasses.replace(good.load, load=None, why_not="no parameters")))
    judge.submit(dataclasses.replace(good, load=dataclasses.replace(good.load, load=None)))
    judge.submit(good)
    found = reports(3)
    assert [report["verdict"] for report in found] == ["refused here", "more", "unknown"]
    assert found[0]["reason"] == "no parameters"
    assert str(listener.address.port) in found[2]["reason"]


def test_the_log_gets_the_first_of_each_verdict_and_then_each_tenfold(
    judged: Any, pair: Any, caplog: pytest.LogCaptureFixture
) -> None:
    judge, listener, reports = judged
    with caplog.at_level("INFO"):
        for _ in range(12):
            judge.submit(ended(pair, listener.address))
        reports(12)
        judge.close()
    lines = [record.getMessage() for record in caplog.records if "request r from engine" in record.getMessage()]
    assert len(lines) == 2
    assert lines[1].endswith("10 requests like it by now")


def test_a_report_file_that_cannot_be_written_is_told_once_and_costs_no_verdict(
    pair: tuple[EngineLayout, EngineLayout], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "gone" / "reports"
    judge = ShadowJudge(pair[1].engine, handshake_timeout_s=5.0, report_file=str(file))
    with caplog.at_level("INFO"):
        for _ in range(10):
            judge.submit(
                ended(pair, Address("127.0.0.1", 1), load=ShadowLoad(None, "r", 13, 13, why_not="no parameters"))
            )
        judge.close()
    judge._thread.join(60.0)
    told = [record for record in caplog.records if str(file) in record.getMessage()]
    assert len(told) == 1
    assert all(record.exc_info is None for record in caplog.records)
    verdicts = [record for record in caplog.records if "refused here (no parameters)" in record.getMessage()]
    assert [record.count for record in verdicts] == [1, 10]  # type: ignore[attr-defined]


def test_a_report_file_may_be_named_from_the_home_directory(
    pair: tuple[EngineLayout, EngineLayout], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the directory of flight records."""
    monkeypatch.setenv("HOME", str(tmp_path))
    judge = ShadowJudge(pair[1].engine, handshake_timeout_s=5.0, report_file="~/reports")
    judge.submit(ended(pair, Address("127.0.0.1", 1), load=ShadowLoad(None, "r", 13, 13, why_not="no parameters")))
    judge.close()
    judge._thread.join(60.0)
    assert (tmp_path / "reports").read_text().count("\n") == 1
