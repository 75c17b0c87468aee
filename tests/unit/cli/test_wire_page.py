"""Does docs/wire.md say what the code does? Its examples are files, and the files are what the code reads and writes."""

import json
import re
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.unit.cli.wire_formula import cell_address, page_and_byte
from typer.testing import CliRunner

from kvreshard.cli.app import app
from kvreshard.model import AxisMap, Cyclic, Digit, Interval, wire

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "golden" / "wire"
PAGE = (ROOT / "docs" / "wire.md").read_text(encoding="utf-8")
LAYOUTS = ("prefill-v1.json", "decode-v1.json")


def golden(name: str) -> Any:
    return json.loads((GOLDEN / name).read_text())


def test_examples_of_the_page_are_the_golden_files() -> None:
    shown = dict(re.findall(r"^```\w+ tests/golden/wire/(\S+)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL))
    assert sorted(shown) == sorted(
        ["maps.json", "addresses.json", "tables.json", "copies.jsonl", "prefill-v1.json", "prefill-v1.msgpack.hex"]
    )
    for name, text in shown.items():
        assert text == (GOLDEN / name).read_text(), name


@pytest.mark.parametrize("vector", golden("maps.json"), ids=lambda vector: vector["what"])
def test_axis_maps_locate_as_the_vectors_say(vector: dict[str, Any]) -> None:
    expected = list(zip(vector["pages"], vector["bytes"], strict=True))
    assert [page_and_byte(vector["axis_map"], c) for c in vector["coordinates"]] == expected
    mapped = axis_map_of(vector["axis_map"])
    pages, offsets = mapped.locate(mapped.owned.to_local(np.array(vector["coordinates"], dtype=np.int64)))
    assert list(zip(pages.tolist(), offsets.tolist(), strict=True)) == expected


def axis_map_of(told: dict[str, Any]) -> AxisMap:
    owned = told["owned"]
    held = Cyclic(**owned) if "step" in owned else Interval(owned["start"], owned.get("stop"))
    return AxisMap(told["axis"], held, tuple(Digit(**digit) for digit in told["digits"]))


@pytest.mark.parametrize("vector", golden("addresses.json"), ids=lambda vector: vector["layout"])
def test_cells_have_the_addresses_of_the_vectors(vector: dict[str, Any]) -> None:
    layout = golden(vector["layout"])
    found = cell_address(layout, vector["rank"], vector["field"], vector["coordinates"], vector["pages"])
    assert found == vector["address"]


@pytest.mark.parametrize("name", LAYOUTS)
def test_layouts_of_version_1_read_and_write_unchanged(name: str) -> None:
    content = (GOLDEN / name).read_bytes()
    assert wire.encode(wire.decode(content, "json"), "json") + b"\n" == content


def test_msgpack_of_version_1_reads_and_writes_unchanged() -> None:
    message = bytes.fromhex((GOLDEN / "prefill-v1.msgpack.hex").read_text())
    layout = wire.decode(message)
    assert layout == wire.decode((GOLDEN / "prefill-v1.json").read_bytes(), "json")
    assert wire.encode(layout) == message


def run_plan(*options: str) -> str:
    result = CliRunner().invoke(app, ["plan", *(str(GOLDEN / name) for name in LAYOUTS), *options])
    assert result.exit_code == 0, result.output
    return result.stdout


def test_the_command_prints_the_copy_list_of_the_page() -> None:
    """In any order, as the page says."""
    printed = run_plan("--copies", "--fills", "--tables", str(GOLDEN / "tables.json"))
    assert sorted(printed.splitlines()) == sorted((GOLDEN / "copies.jsonl").read_text().splitlines())


def test_the_copy_list_is_what_the_page_defines() -> None:
    """The page's definition, byte by byte, from nothing but the JSON files."""
    src, dst, tables = golden(LAYOUTS[0]), golden(LAYOUTS[1]), golden("tables.json")
    wanted: dict[int, int] = {}
    for rank, field in product([r["rank"] for r in dst["ranks"]], dst["fields"]):
        group = "state" if all(axis["extent"] for axis in field["axes"]) else "full"
        ranges = [
            range(*tables["intervals"]["full"][0]) if a["extent"] is None else range(a["extent"]) for a in field["axes"]
        ]
        for cell in product(*ranges):
            coordinates = {axis["name"]: c for axis, c in zip(field["axes"], cell, strict=True)}
            to = cell_address(dst, rank, field["name"], coordinates, tables["decode"][group]["pages"])
            if to is None:
                continue
            source = cell_address(src, 0, field["name"], coordinates, tables["prefill"][group]["pages"])
            assert source is not None
            wanted |= {to + byte: source + byte for byte in range(field["element_bytes"])}
    lines = [json.loads(line) for line in run_plan("--copies", "--tables", str(GOLDEN / "tables.json")).splitlines()]
    got = [(line["dst_address"] + b, line["src_address"] + b) for line in lines for b in range(line["length"])]
    assert len(got) == len(wanted)
    assert dict(got) == wanted


def test_fills_are_the_rest_of_the_new_pages() -> None:
    dst, tables = golden(LAYOUTS[1]), golden("tables.json")
    document = json.loads(run_plan("--copies", "--fills", "--json", "--tables", str(GOLDEN / "tables.json")))
    new = set()
    for rank, table in product(dst["ranks"], tables["decode"].values()):
        for page, slab in product(table["new_pages"], rank["slabs"]):
            start = rank["regions"][0]["address"] + slab["offset_bytes"] + page * slab["page_stride_bytes"]
            new |= set(range(start, start + slab["page_bytes"]))
    covered = [
        {line["dst_address"] + b for line in document[kind] for b in range(line["length"])}
        for kind in ("copies", "fills")
    ]
    assert covered[1] == new - covered[0]
