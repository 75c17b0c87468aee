"""Does the GPU kit go on when a part of it fails, hangs or dies, and say what happened?"""

import json
import os
import zipfile
from pathlib import Path

import pytest
from bench.gpu import page
from bench.gpu.__main__ import PARTS, Kit, Part, main
from bench.gpu.parts.wire import protocols
from bench.gpu.show import as_text
from bench.gpu.slim_wheel import slim

from kvreshard.transport.base import Direction

ROOT = Path(__file__).resolve().parents[2]


def part(name: str, bound_s: float = 20.0) -> Part:
    return Part(name, bound_s, bound_s, is_timed=True, package="tests.unit.gpu_parts")


def run(
    out: Path, *parts: Part, monkeypatch: pytest.MonkeyPatch, seconds: float | None = None
) -> tuple[int, list[dict]]:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    monkeypatch.setattr("bench.gpu.__main__.PARTS", parts)
    status = Kit(True, "cuda:0", out, seconds).run(parts)
    document = json.loads((out / "gpu-results.json").read_text())
    assert document["is_rehearsal"]
    return status, document["parts"]


def test_every_verdict_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = run(tmp_path, part("finds"), monkeypatch=monkeypatch)
    assert status == 1
    assert [(one["check"], one["verdict"]) for one in found] == [
        ("raises", "failed"),
        ("fails", "failed"),
        ("is skipped", "skipped"),
        ("passes", "passed"),
    ]
    assert found[0]["text"] == "ValueError: no such thing [finds.py:8]"
    assert found[1]["text"] == "one; two"
    assert found[3]["figures"] == {"gb_per_s": 1235.0, "count": 1_000_000, "left_s": True}
    assert found[3]["ratio"] == 2.123
    text = (tmp_path / "gpu-results.txt").read_text()
    assert "1 passed, 2 failed, 1 skipped" in text
    assert "  + passes: ratio 2.12; gb_per_s 1,235, count 1,000,000, left_s True" in text
    assert text.index("what failed") < text.index("- is skipped: a reason")


def test_a_part_that_hangs_is_ended_with_all_that_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = run(tmp_path, part("hangs", 6.0), part("finds"), monkeypatch=monkeypatch)
    assert status == 1
    assert [one["check"] for one in found[:2]] == ["before it hangs", "the whole part"]
    assert found[0]["verdict"] == "passed"
    assert "had not ended after 6 s" in found[1]["text"]
    assert len(found) == 2 + 4  # the next part ran
    assert _is_gone(found[0]["figures"]["child"])


def _is_gone(process: int) -> bool:
    """Killed; it may wait for its parent, which is init now, to notice."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def test_a_part_that_dies_is_told_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = run(tmp_path, part("dies"), part("no_such_part"), monkeypatch=monkeypatch)
    assert status == 1
    assert "ended with exit code 7" in found[0]["text"]
    assert "a driver says something" in found[0]["text"]
    assert "No module named 'tests.unit.gpu_parts.no_such_part'" in found[1]["text"]


def test_a_part_for_which_no_time_is_left_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    status, found = run(tmp_path, part("finds"), monkeypatch=monkeypatch, seconds=0.5)
    assert status == 0
    assert found == [
        {"part": "finds", "check": "the whole part", "verdict": "skipped", "text": "no time was left for it"}
    ]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--device", "gpu"], "--device gpu: give cuda: and a number"),
        (["--parts", "wire,wires"], "no part is called wires; there are wire, contract"),
        (["--seconds", "soon"], "invalid float value: 'soon'"),
    ],
)
def test_bad_arguments_are_refused(words: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert reason in capsys.readouterr().err


def test_every_part_has_its_module_and_its_words() -> None:
    names = [one.name for one in PARTS]
    assert sorted(names) == sorted(path.stem for path in (ROOT / "bench/gpu/parts").glob("[a-z]*.py"))
    assert set(page.WHAT) == set(names)
    text = (ROOT / "bench/gpu/README.md").read_text()
    assert all(f"| `{name}` |" in text for name in names)
    assert sum(one.bound_s for one in PARTS if one.is_timed) < 600


def test_what_ucx_tells_of_its_protocols() -> None:
    told = [
        "a intra-node cfg#1",
        "remote memory read by ucp_get*(multi) into cuda/GPU0 from cuda/dev[1]",
        "remote memory write by ucp_put* from host memory to host",
    ]
    rows = ["0 | no data fetch | ", "1..inf | zero-copy | cuda_ipc/cuda", "0..inf | short | cma/memory"]
    lines = [f"| {told[0]} |", f"| {told[1]} |", f"| {rows[0]} |", f"| {rows[1]} |", f"| {told[2]} |", f"| {rows[2]} |"]
    words = "\n".join(f"[179.0] [vm:1 :0] {line}" for line in lines)
    assert protocols(words, Direction.READ) == ["into cuda/GPU0 from cuda/dev[1]: zero-copy cuda_ipc/cuda"]
    assert protocols(words, Direction.WRITE) == ["from host memory to host: short cma/memory"]
    assert protocols("no table", Direction.READ) == []


def test_a_folder_is_left_out_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "a-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as new:
        new.writestr("a/one.py", "1")
        new.writestr("big/two.so", os.urandom(10_000))
        new.writestr("a-1.dist-info/RECORD", "a/one.py,,\nbig/two.so,,\na-1.dist-info/RECORD,,\n")
    assert slim(wheel, ("big/",)) > 9000
    with zipfile.ZipFile(wheel) as thin:
        assert thin.namelist() == ["a/one.py", "a-1.dist-info/RECORD"]
        assert thin.read("a-1.dist-info/RECORD") == b"a/one.py,,\na-1.dist-info/RECORD,,\n"
    with pytest.raises(ValueError, match=r"has nothing in other/; it has: \['a', 'a-1.dist-info'\]"):
        slim(wheel, ("other/",))
    assert list(tmp_path.iterdir()) == [wheel] or wheel.exists()


def checked(part_name: str, *verdicts: str, check: str = "x") -> list[dict]:
    return [{"part": part_name, "check": check, "verdict": verdict} for verdict in verdicts]


def test_the_page_takes_the_newest_run_in_which_a_part_ended() -> None:
    old = {
        "when": "2026-01-01T00:00:00",
        "is_rehearsal": False,
        "machine": {"gpu": {"name": "A"}},
        "parts": checked("wire", "passed", "failed") + checked("leaks", "passed"),
    }
    new = {
        "when": "2026-02-01T00:00:00",
        "is_rehearsal": False,
        "machine": {"gpu": {"name": "B"}},
        "parts": checked("wire", "passed", "skipped") + checked("leaks", "failed", check="the whole part"),
    }
    rehearsal = {**new, "when": "2027-01-01T00:00:00", "is_rehearsal": True}
    lines = {line.split(" | ")[0][2:]: line for line in page.table([new, old, rehearsal]).splitlines()[2:]}
    assert lines["wire"].endswith("| 1 of 1 | B, 2026-02-01 |")
    assert lines["leaks"].endswith("| 1 of 1 | A, 2026-01-01 |")
    assert lines["model"].endswith("| has not come to its end on a GPU | |")
    assert page.table([rehearsal]) == page.table([]) == page.sentence([]) == "Not yet run on a GPU.\n"
    said = page.sentence([new, old, rehearsal])
    assert said.startswith(
        "Of the checks of the [GPU kit](bench/gpu/README.md) that finished, 2 of 2 passed (A, 2026-01-01; B, 2026-02-01). "
        "Parts that have not finished on a GPU: "
    )
    assert "`wire`" not in said
    assert "`model`" in said


def test_the_pages_show_the_results_that_are_there() -> None:
    documents = [json.loads(path.read_text()) for path in sorted(page.RESULTS.glob("*.json"))]
    for name, write in page.PAGES.items():
        found = page.PLACE.search((ROOT / name).read_text(encoding="utf-8"))
        assert found is not None, name
        assert found.group() == write(documents), f"{name}: run python -m bench.gpu.page"


def test_a_text_names_what_it_ran_on() -> None:
    document = {
        "when": "w",
        "is_rehearsal": False,
        "device": "cuda:0",
        "seconds": 1.0,
        "parts": [],
        "machine": {"gpu": {"name": "H", "driver_version": "5"}, "nvlinks": 0, "cores": 3, "packages": {"nixl": "1"}},
    }
    assert as_text(document).splitlines() == [
        "kvreshard's GPU kit on H as cuda:0, w, 1 s",
        "0 passed, 0 failed, 0 skipped",
        "nixl 1",
        "driver 5, NVLinks seen: 0, 3 cores",
    ]
