"""`kvreshard verify`: does it pass what is right, and name what is wrong?"""

import io
import json
import re

import pytest
from tests.faulty_memory import Fault, FaultPlan, FaultyFabric, FaultyTransport

from kvreshard.cli import verify
from kvreshard.model import KvReshardError
from kvreshard.testing.ranks import LocalRanks, RankDiedError, Ranks

QUICK = ("verify", "--transport", "memory", "--tokens", "70", "--requests", "2", "--layers", "6")
SMALL = (*QUICK, "--prefill", "tp=1", "--decode", "tp=2")


def make_faulty(fault: Fault, rank: int) -> object:
    """Ranks in memory, of which one's first post has a fault."""

    def plan(index: int, _transfer: object) -> Fault:
        return fault if index == 0 else Fault()

    def make_ranks(transport: verify.TransportName, num_ranks: int, memory_bytes: int, device: str) -> Ranks:
        fabric = FaultyFabric()
        plans: dict[int, FaultPlan] = {rank: plan}
        ranks = LocalRanks(
            num_ranks,
            memory_bytes,
            lambda number: FaultyTransport(
                fabric, f"rank{number}", **({"faults": plans[number]} if number in plans else {})
            ),
        )
        ranks.patience_s = 0.1  # for the reports of a transfer that failed
        return ranks

    return make_ranks


def test_a_right_transfer_is_called_right(run) -> None:
    result = run(*SMALL)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("gemma-4-26b-a4b: tp=1 -> tp=2\nwhat              how much\n")
    assert re.search(r"^moved +[\d.,]+ MiB of cache in [\d.]+ m?s, [\d.,]+ [KMG]iB/s$", result.stdout, re.MULTILINE)
    assert re.search(r"^layers +6 of 30, ", result.stdout, re.MULTILINE)
    assert result.stdout.splitlines()[-1].startswith("right: every byte of 2 decode ranks")
    assert result.stderr == ("verifying gemma-4-26b-a4b: tp=1 -> tp=2, 3 ranks with 29.2 MiB of pages together\n")


def test_layers_that_cannot_be_so_few_are_told(run) -> None:
    hybrid = ("verify", "--model", "nemotron-3-nano-30b-a3b", "--prefill", "tp=1", "--decode", "tp=2", "--tokens", "70")
    result = run(*hybrid, "--transport", "memory", "--layers", "1")
    assert "note: 2 layers are taken, not 1: each sort of layer is among them at least once" in result.stderr
    assert "note:" not in run(*hybrid, "--transport", "memory", "--layers", "2").stderr


@pytest.mark.parametrize("options", [["--push"], ["--way", "direct"], ["--way", "staged"]], ids=" ".join)
def test_every_way_passes_and_moves_the_same(run, options: list[str]) -> None:
    document = json.loads(run(*SMALL, *options, "--json").stdout)
    assert document["passed"]
    assert document["findings"] == []
    assert document["push"] == ("--push" in options)
    assert (document["num_staged_bytes"] > 0) == ("staged" in options)
    assert document["num_bytes"] == json.loads(run(*SMALL, "--json").stdout)["num_bytes"]


def test_a_flipped_byte_is_found_and_named(run, monkeypatch) -> None:
    monkeypatch.setattr(verify, "make_ranks", make_faulty(Fault(corrupt_byte=5), rank=2))
    result = run(*SMALL, "--way", "direct")
    assert result.exit_code == 1
    wrong = re.search(
        r"^wrong: decode rank 1: 1 byte; the first is field 'layers\.\d+\.attn\.[kv]', token \d+, head \d, channel \d+ of "
        r"request \d \(byte \d+ of region 'kv'\)$",
        result.stdout,
        re.MULTILINE,
    )
    assert wrong, result.stdout
    assert "right:" not in result.stdout
    document = json.loads(run(*SMALL, "--way", "direct", "--json").stdout)
    assert not document["passed"]
    assert document["findings"][0].startswith("decode rank 1: 1 byte; the first is field 'layers.")


def test_a_transfer_that_fails_is_told(run, monkeypatch) -> None:
    monkeypatch.setattr(verify, "make_ranks", make_faulty(Fault(fail_after_copies=1), rank=1))
    result = run(*SMALL, "--way", "direct")
    assert result.exit_code == 1
    assert "wrong: transfer: injected" in result.stdout


def test_a_rank_that_dies_is_an_error_and_no_verdict(run, monkeypatch) -> None:
    def dying(*_: object) -> Ranks:
        raise RankDiedError("rank 3 (pid 1) ended with exit code 1")

    monkeypatch.setattr(verify, "make_ranks", dying)
    result = run(*SMALL)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[1:] == [
        "error: the verification could not be finished: rank 3 (pid 1) ended with exit code 1"
    ]


def test_without_nixl_the_remedy_is_told(run, monkeypatch) -> None:
    monkeypatch.setattr(verify.importlib.util, "find_spec", lambda name: None)
    result = run(*SMALL, "--transport", "nixl")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "NIXL is not installed" in result.stderr


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("--device", "cuda"), "--device cuda: no device has that name; give cpu, or cuda: and a number, as cuda:0"),
        (("--device", "gpu:0"), "--device gpu:0: no device has that name"),
        (("--device", "cuda:0", "--transport", "memory"), "--transport memory, which copies host memory only"),
    ],
)
def test_a_device_that_cannot_be_is_refused(run, options: tuple[str, ...], reason: str) -> None:
    result = run(*SMALL, "--transport", "nixl", *options)
    assert (result.exit_code, result.stdout) == (2, "")
    assert reason in result.stderr


@pytest.mark.nixl
@pytest.mark.slow
def test_a_device_that_is_not_there_is_refused(run) -> None:
    result = run(*SMALL, "--transport", "nixl", "--device", "cuda:7")
    assert (result.exit_code, result.stdout) == (2, "")
    assert re.search(r"^error: .*cuda:7", result.stderr, re.MULTILINE)


def test_a_mismatch_is_of_the_kind_that_plan_says(run) -> None:
    pair = ("--model", "llama-3.1-8b", "--prefill", "tp=1", "--decode", "tp=1,dtype=fp8", "--json")
    verified, planned = run(*QUICK, *pair), run("plan", *pair)
    errors = [json.loads(result.stdout)["error"] for result in (verified, planned)]
    assert [error["type"] for error in errors] == ["LayoutMismatch", "LayoutMismatch"]
    assert all("encoding is 'bfloat16' in engine 'prefill'" in error["message"] for error in errors)


@pytest.mark.nixl
@pytest.mark.slow
def test_over_nixl_between_processes(run) -> None:
    document = json.loads(run(*SMALL, "--transport", "nixl", "--tokens", "40", "--json").stdout)
    assert document["passed"]
    assert document["transport"] == "nixl"


@pytest.mark.parametrize(("num_ranks", "is_asked"), [(16, False), (17, True)])
def test_many_more_processes_than_cores_are_asked_for(monkeypatch, num_ranks: int, *, is_asked: bool) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO())
    if not is_asked:
        verify.confirm_processes(num_ranks, 2)
        return
    with pytest.raises(KvReshardError, match=r"17 ranks are 17 processes on 2 cores, .*give --yes"):
        verify.confirm_processes(num_ranks, 2)


def test_nothing_is_started_before_a_yes(run, monkeypatch) -> None:
    started: list[int] = []

    def make_ranks(transport: verify.TransportName, num_ranks: int, memory_bytes: int, device: str) -> Ranks:
        started.append(num_ranks)
        fabric = FaultyFabric()
        return LocalRanks(num_ranks, memory_bytes, lambda rank: FaultyTransport(fabric, f"rank{rank}"))

    monkeypatch.setattr(verify, "RANKS_PER_CORE", 0)
    monkeypatch.setattr(verify, "make_ranks", make_ranks)
    refused = run(*SMALL, "--transport", "nixl")
    assert (refused.exit_code, started) == (2, [])
    assert "give --yes to start them" in refused.stderr
    assert run(*SMALL, "--transport", "nixl", "--yes").exit_code == 0
    assert started == [3]
