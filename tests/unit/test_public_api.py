"""Does `import kvreshard` offer what its page says, lazily, and does wrong use raise one error that says what was expected?"""

import ast
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import kvreshard as kv

ROOT = Path(__file__).resolve().parents[2]
# What `kvreshard replay` reads is no part of the public API yet.
PRIVATE_EXAMPLES = {"replay_a_record.py"}


def test_names_for_type_checkers_are_the_names_at_run_time() -> None:
    tree = ast.parse(Path(kv.__file__).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    shown = {
        alias.asname: f"{node.module}.{alias.name}"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    places = {name: f"kvreshard.{place}" for name, place in kv._PLACES.items()}
    assert shown == {
        name: place.replace(":", ".") if ":" in place else f"{place}.{name}" for name, place in places.items()
    }
    assert set(shown) <= set(dir(kv))


@pytest.mark.parametrize("name", sorted(kv._PLACES))
def test_every_name_is_there_and_in_the_modules_page(name: str) -> None:
    assert getattr(kv, name).__doc__
    assert f"`{name}`" in (kv.__doc__ or "") or f"`{name}`s" in (kv.__doc__ or "")


def test_other_names_are_refused_with_the_ones_there_are() -> None:
    with pytest.raises(AttributeError, match=r"no public name 'compile'; its names are .*compile_routes"):
        _ = kv.compile


def test_the_bare_import_loads_nothing() -> None:
    code = "import sys, kvreshard; print(sorted(m for m in sys.modules if m.startswith(('kvreshard.', 'numpy'))))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_examples_use_public_names_only(path: Path) -> None:
    modules = {
        node.module
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kvreshard")
    }
    assert modules == {"kvreshard"} or path.name in PRIVATE_EXAMPLES


LAYOUT = kv.describe(kv.load("deepseek-v2-lite"), kv.parse_engine("tp=1"), "engine", num_pages=4)
TABLES = {"latent": kv.PageTable([1], num_tokens=3)}
REQUEST = kv.Request(TABLES, TABLES, {"latent": [(0, 3)]}, {"latent": np.array([1])})

ROUTE = kv.compile_routes(LAYOUT, LAYOUT)[0]
ELSEWHERE = kv.relocate(LAYOUT, {0: {"kv": 1 << 41}})
MOVER = kv.Mover(kv.MemoryTransport(kv.Fabric()), kv.HostMemory(), {})
OTHER = kv.describe(kv.load("deepseek-v2-lite"), kv.parse_engine("tp=1"), "other", num_pages=4)


def with_key(old: str, new: str) -> bytes:
    document = json.loads(kv.encode_layout(LAYOUT, "json"))
    document[new] = document.pop(old)
    return json.dumps(document).encode()


WRONG: list[tuple[Callable[[], object], str]] = [
    (lambda: kv.Request({"latent": ([1], 3)}, TABLES, {}, {}), "src_tables['latent'] is of type tuple, and must be PageTable"),
    (lambda: kv.Request(TABLES, [TABLES], {}, {}), "dst_tables is of type list, and must be Mapping"),
    (lambda: kv.Request(TABLES, TABLES, {"latent": (0, 3)}, {}), "an interval of group 'latent' is 0, and must be (first token"),
    (lambda: kv.compile_routes({}, LAYOUT), "the source's layout is of type dict, and must be EngineLayout: what `kvreshard.describe`"),
    (lambda: kv.compile_routes(LAYOUT, None), "the destination's layout is of type NoneType, and must be EngineLayout"),
    (lambda: kv.bind(LAYOUT, REQUEST), "a route is of type EngineLayout, and must be Route: what `kvreshard.compile_routes` returns"),
    (lambda: kv.bind(kv.compile_routes(LAYOUT, LAYOUT), REQUEST), "a route is of type list"),
    (lambda: kv.bind(kv.compile_routes(LAYOUT, LAYOUT)[0], TABLES), "a request is of type dict, and must be Request"),
    (lambda: kv.describe("llama", kv.parse_engine("tp=1"), "e"), "a model is of type str, and must be Model: what `kvreshard.load`"),
    (lambda: kv.describe(kv.load("llama-3.1-8b"), "tp=1", "e"), "an engine is of type str, and must be EngineSpec"),
    (lambda: kv.parse_engine({"tp": 1}), "an engine is of type dict, and must be str: as in 'tp=4,page=16'"),
    (lambda: kv.decode_layout({}, "json"), "a layout message is of type dict, and must be bytes"),
    (lambda: kv.decode_layout(with_key("fields", "feilds"), "json"), "unknown field `feilds`; did you mean `fields`?"),
    (lambda: kv.decode_layout(with_key("fields", "zz"), "json"), "unknown field `zz`; known are address, axes, "),
    (lambda: kv.encode_layout(None), "a layout is of type NoneType, and must be EngineLayout"),
    (lambda: kv.load(5), "a model is of type int, and must be str: an id of `kvreshard models`"),
    (lambda: kv.load("llama-3.1-8b", Path("draft")), "a draft is of type PosixPath, and must be str: an id of `kvreshard models`"),
    (lambda: kv.describe(kv.load("llama-3.1-8b"), kv.parse_engine("tp=1"), 5), "the engine's name is of type int"),
    (lambda: kv.describe(kv.load("llama-3.1-8b"), kv.parse_engine("tp=1"), "e", num_pages=0), "num_pages is 0; page 0 stands for no page"),
    (lambda: kv.describe(kv.load("llama-3.1-8b"), kv.parse_engine("tp=1"), "e", num_pages=2.5), "num_pages is 2.5, and must be a whole number"),
    (lambda: kv.compile_routes(LAYOUT, LAYOUT, way="foo"), "way is 'foo', and must be 'direct' or 'staged'"),
    (lambda: kv.compile_routes(LAYOUT, LAYOUT, ranks="0"), "a rank is '0', and must be a whole number"),
    (lambda: kv.find_unwritten(LAYOUT, 9, REQUEST, []), "engine 'engine' has no rank 9; its ranks are [0]"),
    (lambda: kv.explain([]), "explain takes routes of one pair of engines"),
    (lambda: kv.relocate(LAYOUT, {}), "engine 'engine': no address is given for region"),
    (lambda: kv.CostModel(copy_s=-1), "copy_s is -1; the constants of a cost model must be positive"),
    (lambda: kv.digest_transfers([], "foo", REQUEST, kv.HostMemory(), b"k"), "side is 'foo', and must be 'src' or 'dst'"),
    (lambda: kv.digest_transfers(ROUTE.transfers, "src", {}, kv.HostMemory(), b"k"), "a request is of type dict, and must be Request"),
    (lambda: kv.digest_transfers(ROUTE.transfers, "src", REQUEST, kv.HostMemory(), "k"), "the key of a digest is of type str, and must be bytes"),
    (lambda: kv.explain(ROUTE), "routes is of type Route, and must be Sequence"),
    (lambda: kv.explain([LAYOUT]), "a route is of type EngineLayout, and must be Route"),
    (lambda: kv.compile_routes(LAYOUT, LAYOUT, cost=3), "cost is of type int, and must be CostModel"),
    (lambda: kv.relocate(LAYOUT, {0: dict.fromkeys(LAYOUT.ranks[0].template.regions, "1")}), "of rank 0 is '1', and must be a whole number"),
    (lambda: kv.pull(MOVER, [ROUTE], REQUEST, LAYOUT), "a route is of type list, and must be Route"),
    (lambda: kv.pull(MOVER, ROUTE, REQUEST, LAYOUT, b"done"), "rank 0 reports to source rank 0, which is not among the peers"),
    (lambda: kv.push(MOVER, ROUTE, REQUEST, 0), "routes is of type Route, and must be Iterable"),
    (lambda: kv.push(MOVER, [ROUTE], REQUEST, 99), "99 is no source rank of these routes, whose source ranks are 0"),
    (lambda: kv.pull(MOVER, ROUTE, REQUEST, OTHER), "the route ends at engine 'engine', and the layout is that of engine 'other'"),
    (lambda: kv.CopyList.of([1.9], [1], 1), "the source addresses of copies are float64, and must be whole numbers below 2**63"),
    (lambda: kv.CopyList.of([1], ["7"], 1), "the destination addresses of copies are <U1"),
    (lambda: kv.CopyList.of([1], [1], True), "the lengths of copies are bool"),
    (lambda: kv.CopyList.of([2**63], [1], 1), "the source addresses of copies are uint64"),
    (lambda: kv.CopyList.of([2**64], [1], 1), "the source addresses of copies are object"),
    (lambda: kv.compile_routes(LAYOUT, LAYOUT, [[0]]), "a rank is [0], and must be a whole number"),
    (lambda: kv.find_unwritten(LAYOUT, [0], REQUEST, []), "the destination rank is [0], and must be a whole number"),
    (lambda: kv.find_unwritten(LAYOUT, 0, kv.Request({}, TABLES, {}, {"full": [1]}), []), "group 'full': the request has new pages for it, but the"),
    (lambda: kv.name_fields("layers.0.attn.k"), "the names of fields are the text 'layers.0.attn.k'; give a list of names"),
    (lambda: kv.find_unwritten(LAYOUT, ROUTE, REQUEST, []), "the destination rank is Route("),
    (lambda: kv.relocate(LAYOUT, {0: {"kv": 0}}, 0), "the device is of type int, and must be str: as in 'cpu' or 'cuda:0'"),
    (lambda: kv.relocate(LAYOUT, {0: {"kv": 0}}, "cpu\n"), "device 'cpu\\n': must be a name"),
    (lambda: kv.digest_transfers([ROUTE], "src", REQUEST, kv.HostMemory(), b"k"), "a transfer is of type Route, and must be RankTransfer"),
    (lambda: kv.digest_transfers(ROUTE.transfers, "src", REQUEST, kv.HostMemory(), b"k", 5), "the fields is of type int"),
    (lambda: kv.digest_transfers(ROUTE.transfers, "src", REQUEST, kv.HostMemory(), b"k", "layers.0.attn.latent"), "the fields are the text 'layers.0"),
    (lambda: kv.EngineLayout(5, LAYOUT.fields, LAYOUT.groups, LAYOUT.ranks), "the engine of a layout is of type int, and must be str"),
    (lambda: kv.EngineLayout("e", None, LAYOUT.groups, LAYOUT.ranks), "the fields of a layout is of type NoneType"),
    (lambda: kv.EngineLayout("e", LAYOUT.fields, ["g"], LAYOUT.ranks), "one of the groups of a layout is of type str, and must be Group"),
    (lambda: kv.pull(MOVER, ROUTE, REQUEST, ELSEWHERE), "lies at 0x20000000000 in the layout, and the route writes it at 0x10000000000; give"),
    (lambda: kv.pull(None, ROUTE, REQUEST, LAYOUT), "a mover is of type NoneType, and must be Mover"),
    (lambda: kv.pull(MOVER, ROUTE, REQUEST, None), "the destination's layout is of type NoneType, and must be EngineLayout"),
    (lambda: kv.push(MOVER.transport, [ROUTE], REQUEST, 0), "a mover is of type MemoryTransport, and must be Mover"),
    (lambda: kv.push(MOVER, [ROUTE], REQUEST, [0]), "the source rank is [0], and must be a whole number"),
    (lambda: kv.Mover(MOVER.transport, MOVER.memory, {}, 30.0), "the staging of a mover is of type float, and must be Staging"),
    (lambda: kv.Mover(MOVER.transport, MOVER.memory, {}, timeout_s="1"), "timeout_s of a mover is of type str, and must be Real"),
    (lambda: kv.Mover(MOVER.transport, MOVER.memory, {}, timeout_s=float("nan")), "timeout_s of a mover is nan, and must be from 0 to"),
    (lambda: kv.Mover(MOVER.transport, MOVER.memory, {}, clock=1.0), "the clock of a mover is of type float"),
    (lambda: kv.pull(MOVER, ROUTE, REQUEST, LAYOUT, "done"), "a report is of type str, and must be bytes"),
    (lambda: kv.compile_routes(LAYOUT, LAYOUT, 0), "the ranks is of type int, and must be Iterable"),
    (lambda: kv.relocate(LAYOUT, [1]), "the addresses is of type list, and must be Mapping"),
    (lambda: kv.relocate(LAYOUT, {0: [1]}), "the addresses of rank 0 is of type list"),
    (lambda: kv.MemoryRegion(np.zeros(4), 4), "the address of a region is array"),
    (lambda: kv.MemoryRegion(4, 4, 0), "the device of a region is of type int"),
    (lambda: kv.MemoryTransport("x"), "the fabric of a memory transport is of type str"),
    (lambda: MOVER.transport.add_peer("z", "junk"), "a peer's metadata is of type str"),
    (lambda: MOVER.transport.register(kv.MemoryRegion(4, 4)), "regions to register is of type MemoryRegion"),
    (lambda: MOVER.transport.register([4]), "a region is of type int"),
    (lambda: kv.digest_transfers(ROUTE, "src", REQUEST, kv.HostMemory(), b"k"), "the transfers is of type Route"),
    (lambda: kv.digest_transfers(ROUTE.transfers, "src", REQUEST, np.zeros(4), b"k"), "the memory is of type ndarray; for host memory give"),
    (lambda: kv.compare({"latent": 1}, {}), "a part of the digests is of type str, and must be Part"),
    (lambda: kv.find_unwritten(LAYOUT, 0, REQUEST, [[]]), "a part of the copies is of type list, and must be CopyList"),
    (lambda: kv.compare(None, {}), "the digests of a side is of type NoneType"),
    (lambda: kv.find_unwritten(LAYOUT, 0, REQUEST, None), "the copies is of type NoneType"),
    (lambda: kv.find_unwritten(LAYOUT, 0, {}, []), "a request is of type dict"),
    (lambda: kv.oracle_transfer(LAYOUT, LAYOUT, {}, {}, REQUEST), "the source's memory lacks region"),
    (lambda: kv.oracle_transfer(LAYOUT, LAYOUT, None, {}, REQUEST), "the source's memory is of type NoneType"),
    (lambda: list(kv.check_route(None, LAYOUT)), "a layout is of type NoneType"),
    (lambda: list(kv.check_host("5600", False)), "port is '5600', and must be a whole number"),
    (lambda: list(kv.check_host(-1, False)), "port is -1, and must be from 1 to 65535"),
    (lambda: kv.encode_layout(LAYOUT, "JSON"), "encoding is 'JSON', and must be 'msgpack' or 'json'"),
    (lambda: kv.decode_layout(b"{}", "yaml"), "encoding is 'yaml', and must be 'msgpack' or 'json'"),
    (lambda: kv.CostModel(copy_s="1e-6"), "copy_s is of type str, and must be Real"),
    (lambda: kv.name_fields(None), "the names of fields is of type NoneType, and must be Iterable"),
    (lambda: kv.name_fields([LAYOUT.fields[0]]), "the name of a field is of type Field, and must be str"),
    (lambda: kv.describe(kv.load("llama-3.1-8b"), kv.parse_engine("tp=1"), "a\nb"), "engine name 'a\\nb': must have 1 to 256 characters"),
    (lambda: kv.describe(kv.load("llama-3.1-8b"), kv.parse_engine("tp=1"), "x" * 257), "(257 characters)': must have 1 to 256 characters"),
    (lambda: kv.Mover(kv.HostMemory(), MOVER.transport, {}), "the transport of a mover is of type HostMemory; write Mover("),
    (lambda: kv.Mover(MOVER.transport, kv.HostMemory(), []), "the peers of a mover is of type list"),
]  # fmt: skip


@pytest.mark.parametrize(("use", "told"), WRONG, ids=[told for _, told in WRONG])
def test_wrong_use_says_what_was_expected(use: Callable[[], object], told: str) -> None:
    with pytest.raises(kv.KvReshardError) as caught:
        use()
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("pages", "new", "told"),
    [
        ([-1], [-1], "the destination's block table names page -1, but its pool 'pages' has pages [0, 4)"),
        ([900], [900], "the destination's block table names page 900"),
        ([1], [2], "page 2 is called new, but is not in the destination's block table"),
    ],
)
def test_bytes_to_zero_are_of_pages_that_there_are(pages: list[int], new: list[int], told: str) -> None:
    """Also where no copy has been bound, which would have refused them."""
    asked = kv.Request(TABLES, {"latent": kv.PageTable(pages, 3)}, {"latent": []}, {"latent": new})
    with pytest.raises(kv.BindError) as caught:
        kv.find_unwritten(LAYOUT, 0, asked, [])
    assert told in str(caught.value)


SIZE_BYTES = LAYOUT.ranks[0].template.region_bytes[0]


@pytest.mark.parametrize("pages", [[1], (1,), range(1, 2), np.array([1], np.int32)])
def test_new_pages_are_whatever_lists_page_ids(pages: object) -> None:
    before, source = np.full(SIZE_BYTES, 3, np.uint8), np.full(SIZE_BYTES, 7, np.uint8)
    asked = kv.Request(TABLES, TABLES, {"latent": [(0, 3)]}, {"latent": pages})
    after = kv.oracle_transfer(LAYOUT, LAYOUT, {(0, "kv"): source}, {(0, "kv"): before}, asked)[0, "kv"]
    holes = kv.find_unwritten(LAYOUT, 0, asked, kv.bind(ROUTE, asked))
    assert np.count_nonzero(after == 0) == int((holes.stop - holes.start).sum()) > 0


@pytest.mark.parametrize(
    ("src_memory", "src_tables", "asked", "told"),
    [
        (np.zeros(SIZE_BYTES), TABLES, {"latent": [(0, 3)]}, "in the source's memory is float64 of shape"),
        (np.zeros(5, np.uint8), TABLES, {"latent": [(0, 3)]}, "in the source's memory is uint8 of shape (5,), and must be uint8 of shape"),
        (None, TABLES, {}, "group 'latent': no token intervals; give an empty list"),
        (None, {}, {"latent": [(0, 3)]}, "group 'latent' of engine 'engine': no block table is given"),
        (None, {"latent": kv.PageTable([], 3)}, {"latent": [(0, 3)]}, "a token that is moved has no page in the block table, which has 0"),
        (None, {"latent": kv.PageTable([-1], 3)}, {"latent": [(0, 3)]}, "there is page -1, but pool 'pages' has pages [0, 4)"),
    ],
)  # fmt: skip
def test_the_oracle_refuses_what_is_not_there(
    src_memory: np.ndarray | None,
    src_tables: dict[str, kv.PageTable],
    asked: dict[str, list[tuple[int, int]]],
    told: str,
) -> None:
    memory = {(0, "kv"): np.zeros(SIZE_BYTES, np.uint8)}
    source = memory if src_memory is None else {(0, "kv"): src_memory}
    with pytest.raises(kv.KvReshardError) as caught:
        kv.oracle_transfer(LAYOUT, LAYOUT, source, memory, kv.Request(src_tables, TABLES, asked, {}))
    assert told in str(caught.value)


@pytest.mark.parametrize("whole", [np.int64, np.uint64, np.int32])
def test_numbers_of_numpy_make_the_same_layout(whole: Callable[[int], int]) -> None:
    """Those of 32 bits would wrap around: a pool of 70,000 pages has 35 GB."""
    model, spec = kv.load("deepseek-v2-lite"), kv.parse_engine("tp=1")
    found = kv.describe(model, spec, "engine", num_pages=whole(70_000))
    found = kv.relocate(found, {0: dict.fromkeys(found.ranks[0].template.regions, whole(1 << 20))})
    expected = kv.relocate(
        kv.describe(model, spec, "engine", num_pages=70_000), {0: {found.ranks[0].template.regions[0]: 1 << 20}}
    )
    assert kv.encode_layout(found) == kv.encode_layout(expected)
