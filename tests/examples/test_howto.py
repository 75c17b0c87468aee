"""Do the kind of docs/howto/add-a-kind.md, the row of docs/howto/add-a-model.md and each engine of docs/howto/engines.md work as they stand there?"""

import importlib
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from kvreshard.catalog import describe, families, load, parse_engine, read_model, warnings
from kvreshard.catalog.spec import engine_keys
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model.tables import PageTable, Request
from kvreshard.plan import bind, compile_route
from kvreshard.testing.oracle import oracle_transfer

HOWTO = Path(__file__).resolve().parents[2] / "docs" / "howto" / "add-a-kind.md"
IMPORTS = """
from collections.abc import Mapping
from dataclasses import dataclass
from kvreshard.kinds.page import PageView, Piece, Style, TensorShape, dtype_bytes, states_per_page
from kvreshard.kinds.place import Place, whole
from kvreshard.model import Axis, AxisMap, Digit, Field
"""


def kind_of_the_page(folder: Path) -> Any:
    """The page's class, imported from a module as anybody would write it."""
    code = re.search(r"```python\n(.*?)```", HOWTO.read_text(encoding="utf-8"), flags=re.DOTALL)
    assert code is not None
    (folder / "summary_kind.py").write_text(IMPORTS + code.group(1))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        return importlib.import_module("summary_kind").Summary


def test_the_example_is_described_routed_and_moved(tmp_path: Path) -> None:
    layer = Layer("layers.0", kind_of_the_page(tmp_path)(channels=6, dtype="bfloat16", tokens_per_state=2))
    src, dst = (
        assemble(name, [layer], [PagedGroup("g", ("layers.0",), page)], Grid(tp), order="NHD", num_pages=8)
        for name, page, tp in (("prefill", 4, 2), ("decode", 6, 1))
    )
    request = Request({"g": PageTable([3, 5, 1], 11)}, {"g": PageTable([2, 7], 11)}, {"g": [(2, 11)]}, {})
    content = np.random.default_rng(0).integers(0, 256, src.ranks[0].regions[0].size_bytes, dtype=np.uint8)
    src_memory = {(rank, "kv"): content for rank in (0, 1)}
    dst_memory = {(0, "kv"): np.zeros(dst.ranks[0].regions[0].size_bytes, dtype=np.uint8)}
    expected = oracle_transfer(src, dst, src_memory, dst_memory, request)[0, "kv"]
    got, bases = dst_memory[0, "kv"].copy(), [layout.ranks[0].regions[0].address for layout in (src, dst)]
    for part in bind(compile_route(src, dst, 0), request):
        assert part.src_rank == 0
        for source, target, length in zip(part.src_address, part.dst_address, part.length, strict=True):
            got[target - bases[1] : target - bases[1] + length] = content[
                source - bases[0] : source - bases[0] + length
            ]
    assert np.array_equal(got, expected)
    assert np.count_nonzero(got)


def test_the_row_of_the_page_reads_its_family(monkeypatch: pytest.MonkeyPatch) -> None:
    code = re.search(
        r"```python\n(.*?)```", HOWTO.with_name("add-a-model.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    assert code is not None
    row = eval(f"{{{code.group(1)}}}", vars(families))  # noqa: S307 - a page of this repository
    assert list(row) == ["example"]
    monkeypatch.setitem(families.FAMILIES, "example", row["example"])
    raw = {
        "model_type": "example",
        "dtype": "bfloat16",
        "n_layer": 6,
        "num_attention_heads": 32,
        "hidden_size": 4096,
        "sliding_window": 64,
    }
    layers = read_model("m", {**raw, "num_nextn_predict_layers": 1, "full_every": 3}).layers
    shapes = [
        (layer.kind.window_tokens, layer.kind.num_kv_heads, layer.kind.head_size, layer.predicts) for layer in layers
    ]
    assert shapes == [(tokens, 8, 128, False) for tokens in (64, 64, None) * 2] + [(None, 8, 128, True)]
    listed = read_model("m", {**raw, "layer_types": ["full_attention"] * 5 + ["sliding_attention"]}).layers
    assert [layer.kind.window_tokens for layer in listed] == [None] * 5 + [64]


# Models that have what a key is about.
HAVING = {"pcp": "deepseek-v3.2", "draft": "kimi-k2.5-eagle3", "conv": "granite-4-h-small"}


def test_every_key_of_an_engine_has_its_row_and_an_example_that_vllm_runs() -> None:
    page = HOWTO.with_name("engines.md").read_text(encoding="utf-8")
    rows = {row[0]: row[2] for row in re.findall(r"^\| `(.+?)` \| (.+?) \| (.+?) \|", page, flags=re.MULTILINE)}
    assert set(rows) == set(engine_keys())
    for key, examples in rows.items():
        model = load(HAVING.get(key, "llama-3.1-8b"))
        for example in re.findall(r"`(.+?)`", examples):
            spec = parse_engine(example)
            assert key.partition(".")[0] in example
            assert describe(model, spec, "engine")
            assert (warnings(model, spec) == []) == (key != "page.<group>"), example
