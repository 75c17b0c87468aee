"""The tables about vLLM against the installed one, whichever release it is, and properties of a layer as vLLM keeps them."""

import re
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import torch
import vllm
from tests.vllm import models
from tests.vllm.engines import fake_config
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLABackend
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from kvreshard.model import LayoutError
from kvreshard.vllm.describe import interiors as table
from kvreshard.vllm.describe.layer_info import read_layer
from kvreshard.vllm.describe.model_config import configured_heads, is_draft, layer_index, total_kv_heads
from kvreshard.vllm.describe.state_forms import FORMS
from kvreshard.vllm.versions import release

pytestmark = pytest.mark.vllm
ROOT = Path(vllm.__file__).parent
NAME = "model.layers.3.self_attn.attn"
SPEC = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def has(file: str, text: str) -> bool:
    """Whether the installed vLLM has this expression, however it is wrapped."""
    path = ROOT / file
    return path.is_file() and " ".join(text.split()) in " ".join(path.read_text().split())


@pytest.mark.parametrize(
    "known", table.INTERIORS, ids=lambda known: f"{known.backends[0]}-{known.cache_dtypes[0]}-{known.platforms[0]}"
)
def test_interiors_hold_where_vllm_says_what_they_are_quoted_for(known: table.KnownInterior) -> None:
    assert known.quotes
    assert known.holds_in(release().minor) == all(has(*quote) for quote in known.quotes)


@pytest.mark.parametrize(
    "row", table.ROWS, ids=lambda row: f"{row.value_bytes + row.scale_bytes}-{row.encoding.replace('/', '-')}"
)
def test_rows_hold_where_vllm_says_what_they_are_quoted_for(row: table.QuantisedRow) -> None:
    assert row.quotes
    assert row.holds_in(release().minor) == all(has(*quote) for quote in row.quotes)


@pytest.mark.parametrize("name", table.STATES)
def test_classes_of_states_have_the_sizes_that_are_read(name: str) -> None:
    known = table.STATES[name]
    assert known.holds_in(release().minor) == all(has(*quote) for quote in known.quotes)
    if not known.holds_in(release().minor):
        return
    text = (ROOT / known.quotes[0][0]).read_text()
    assert re.search(rf"^class {name}\b", text, flags=re.MULTILINE)
    for attribute in FORMS[known.form].sizes:
        assert re.search(rf"self\.{attribute}\b(?:: int)? =", text), f"{name}.{attribute}"


def test_an_expression_that_vllm_lacks_is_not_found() -> None:
    assert has("v1/attention/backends/cpu_attn.py", "kv_cache.chunk(2,   dim=2)")
    assert not has("v1/attention/backends/cpu_attn.py", "kv_cache.chunk(3, dim=2)")
    assert not has("v1/attention/backends/no_such_file.py", "")


@pytest.mark.parametrize("minor", [(0, number) for number in (30, 31, 32, 33, 34)])
def test_facts_do_not_contradict_one_another(minor: table.Minor) -> None:
    seen: dict[Any, str] = {}
    for known in table.INTERIORS:
        if not known.holds_in(minor):
            continue
        for backend in known.backends:
            for cache_dtype in known.cache_dtypes:
                for platform in known.platforms:
                    key = (backend, cache_dtype, platform, known.packing, known.interior == "ring")
                    assert key not in seen, key
                    seen[key] = known.interior
    rows: set[Any] = set()
    for row in table.ROWS:
        if row.holds_in(minor):
            scales = (True, False) if row.has_mx_scales is None else (row.has_mx_scales,)
            keys = {(dtype, row.value_bytes + row.scale_bytes, mx) for dtype in row.cache_dtypes for mx in scales}
            assert not keys & rows, keys
            rows |= keys


NEWEST = (0, 33)


def test_what_is_not_in_the_table_is_unknown() -> None:
    def found(backend: str, cache_dtype: str, platform: str, packing: bool = False, ring: bool = False) -> str | None:
        return table.interior(backend, cache_dtype, platform, NEWEST, packing=packing, ring=ring)

    assert found("FLASH_ATTN", "auto", "cuda") == "cell"
    assert found("FLASH_ATTN", "auto", "cuda", packing=True) is None
    assert found("FLASH_ATTN", "nvfp4", "cuda") is None
    assert found("CPU_ATTN", "auto", "rvv") is None
    assert found("CPU_ATTN", "fp8", "amx-fp8") is None
    assert found("TURBOQUANT", "turboquant_k8v4", "cuda", packing=True) is None
    assert found("ROCM_OCTAVE", "octave_k3v4", "rocm", packing=True) is None
    assert found("CompressorBackend", "", "cuda", ring=True) == "ring"
    assert table.state_form(("Subclass", "MambaMixer2", "MambaBase"), NEWEST) == "mamba2"
    assert table.state_form(("Qwen4ExpPLELayer", "MambaBase"), NEWEST) == "position-conv"
    assert table.state_form(("SomeNewMixer", "MambaBase"), NEWEST) is None


def test_what_a_release_lacks_is_unknown_in_it() -> None:
    tail = [table.interior("KPOOL_TAIL", "", "cuda", (0, n), packing=False, ring=True) for n in (30, 31, 32, 33, 34)]
    assert tail == [None, None, "ring", "ring", "ring"]
    assert [table.state_form(("Glm5NextLinearAttention",), (0, n)) for n in (30, 31)] == [None, "kimi-delta"]


@pytest.mark.parametrize(
    ("cache_dtype", "num_bytes", "mx", "encodings"),
    [
        ("fp8_ds_mla", 656, False, ["fp8_ds_mla/any-scale", "fp8_ds_mla", "fp8_ds_mla", "fp8_ds_mla"]),
        ("fp8_ds_mla", 528, True, [*["mxfp8/scale-per-32"] * 3, "mxfp8/scale-per-32/scales-in-row"]),
        ("nvfp4_ds_mla", 288, True, [None, *["nvfp4/scale-per-16"] * 2, "nvfp4/scale-per-16/scales-in-row"]),
        ("nvfp4_ds_mla", 584, False, ["fp8_ds_mla"] * 4),
        ("", 132, False, ["fp8_e4m3/scale-per-token"] * 4),
        ("", 132, True, [None, None, None, "fp8_e4m3/four-ue8m0-per-token"]),
        ("", 68, True, ["mxfp4/scale-per-32"] * 4),
        ("", 656, False, [None] * 4),
        ("fp8_ds_mla", 352, False, [None] * 4),
    ],
)
def test_what_a_row_of_so_many_bytes_is_in_each_release(
    cache_dtype: str, num_bytes: int, mx: bool, encodings: list[str | None]
) -> None:
    rows = [table.quantised_row(cache_dtype, num_bytes, mx, (0, number)) for number in (30, 31, 32, 33)]
    assert [None if row is None else row.encoding for row in rows] == encodings


def test_keys_of_an_indexer_have_mx_scales_only_where_vllm_says_so() -> None:
    """On SM100, since 0.33; an earlier release does not ask, and this processor is not one."""
    assert has("utils/deep_gemm.py", "def mqa_logits_use_mx_scales() -> bool:") == (release().minor >= (0, 33))
    assert release().has_mx_scales() is False


def attention_layer(**changes: Any) -> Any:
    """What vLLM's `Attention` keeps, as far as it is read."""
    one = torch.tensor(1.0)
    values: dict[str, Any] = {
        "get_attn_backend": lambda: CPUAttentionBackend,
        "kv_cache_dtype": "auto",
        "kv_sharing_target_layer_name": None,
        "is_draft_layer": False,
        "_k_scale": one,
        "_v_scale": one,
    }
    return SimpleNamespace(**{**values, **changes})


def read(layer: Any, spec: Any = SPEC, tp: int = 1, **config: Any) -> Any:
    return read_layer(fake_config(layers={NAME: layer}, **config), NAME, spec, tp)


def test_a_layer_that_is_not_there_has_no_facts() -> None:
    assert read_layer(fake_config(), NAME, SPEC, 1).backend == "unknown"


def test_the_instruction_set_is_the_layers_else_what_its_builder_will_say() -> None:
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    assert read(attention_layer(isa="vec16")).platform == "vec16"
    assert read(attention_layer()).platform == _get_attn_isa(torch.bfloat16, 128, 64, "auto")
    assert read(attention_layer(get_attn_backend=lambda: CPUMLABackend)).platform == "cpu"
    assert read(attention_layer()).backend == "CPU_ATTN"


def test_scales_are_read_for_one_scale_per_tensor() -> None:
    half = torch.tensor([0.5])
    assert read(attention_layer()).scales is None
    assert read(attention_layer(kv_cache_dtype="fp8", _k_scale=half)).scales == (0.5, 1.0)
    with pytest.raises(LayoutError, match="2 fp8 scales"):
        read(attention_layer(kv_cache_dtype="fp8_e4m3", _k_scale=torch.ones(2)))


def test_a_cpu_cache_of_another_float_dtype_is_refused() -> None:
    assert read(attention_layer(kv_cache_dtype="bfloat16")).cache_dtype == "bfloat16"
    with pytest.raises(LayoutError, match=r"a cache of float16 for a model of bfloat16.*--kv-cache-dtype auto"):
        read(attention_layer(kv_cache_dtype="float16"))
    assert (
        read(attention_layer(kv_cache_dtype="float16", get_attn_backend=lambda: CPUMLABackend)).cache_dtype == "float16"
    )


class Handler:
    """What a platform may register for a cache dtype, also one of vLLM's own."""


def test_a_cache_dtype_that_a_platform_has_registered_a_class_for_is_not_what_its_name_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if release().minor >= (0, 33):
        monkeypatch.setitem(import_module("vllm.config.cache")._KV_CACHE_DTYPE_HANDLERS, "fp8", Handler())
    else:  # which has no such registry: here only what is done with one
        assert release().find_dtype_handler("fp8") is None
        named = f"{Handler.__module__}.{Handler.__qualname__}"
        monkeypatch.setattr(type(release()), "find_dtype_handler", lambda _self, name: named if name == "fp8" else None)
    found = read(attention_layer(kv_cache_dtype="fp8", _k_scale=torch.ones(2)))
    assert found.cache_dtype == f"fp8({__name__}.Handler)"
    assert table.interior("CPU_ATTN", found.cache_dtype, "vec", release().minor, packing=False) is None
    assert read(attention_layer()).cache_dtype == "auto"


def test_names_that_share_a_cache_and_marked_drafts() -> None:
    found = read(attention_layer(kv_sharing_target_layer_name="model.layers.1.self_attn.attn", is_draft_layer=True))
    assert (found.shares_with, found.is_draft) == ("model.layers.1.self_attn.attn", True)


class MambaMixer2:
    """The attributes of vLLM's class of this name; the name is what it is known by."""

    def __init__(self, n_groups: int, tp: int, **changes: Any) -> None:
        copies = n_groups % tp != 0
        self.num_heads, self.head_dim, self.ssm_state_size, self.conv_kernel_size = 8, 4, 6, 4
        self.n_groups = tp if copies else n_groups
        self.conv1d = type("ColumnParallelLinear" if copies else "MergedColumnParallelLinear", (), {})()
        self.__dict__.update(changes)

    def get_attn_backend(self) -> Any:
        return SimpleNamespace(get_name=lambda: "MAMBA2_ATTN")


@pytest.mark.parametrize(("groups", "tp"), [(1, 1), (1, 2), (1, 4), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("key", ["n_groups", "mamba_n_groups", None])
def test_groups_that_the_mixer_copies_are_counted_once(groups: int, tp: int, key: str | None) -> None:
    """With as many groups as ranks the layer's own number does not tell copies from groups."""
    spec = MambaSpec(block_size=1, shapes=((1, 1),), dtypes=(torch.float32,))
    text = {} if key is None else {key: groups}
    found = read(MambaMixer2(groups, tp), spec, tp, text=text)
    assert (found.state_form, found.state_sizes["n_groups"]) == ("mamba2", groups)
    assert found.state_sizes["ssm_state_size"] == 6


def test_groups_that_contradict_the_config_are_refused() -> None:
    spec = MambaSpec(block_size=1, shapes=((1, 1),), dtypes=(torch.float32,))
    with pytest.raises(LayoutError, match="copies and groups cannot be told apart"):
        read(MambaMixer2(1, 4), spec, 4, text={"n_groups": 4})


def test_indices_and_drafts() -> None:
    assert [layer_index(name) for name in ("model.layers.7.mixer", "mtp.layers.0.attn", "draft_model.x")] == [
        7,
        0,
        None,
    ]
    assert is_draft("model.layers.32.self_attn.attn", 32, False)
    assert not is_draft("model.layers.31.self_attn.attn", 32, False)
    assert not is_draft("model.layers.31.self_attn.attn", None, False)
    assert is_draft("mtp.layers.0.attn", 32, False)
    assert is_draft("model.mtp.layers.0.self_attn.attn", 32, False)
    assert is_draft("draft_model.model.layers.0.attn", 32, False)
    assert is_draft("model.layers.1.attn", 32, True)


def block(num_sharing: int | None) -> SimpleNamespace:
    """A block of Nemotron-NAS, in which so many query heads share a KV head."""
    return SimpleNamespace(attention=SimpleNamespace(n_heads_in_group=num_sharing))


def test_heads_of_layers_that_differ() -> None:
    step = {
        "attention_other_setting": {"attention_type": "window", "num_attention_groups": 3},
        "layer_types": ["full"] * 3 + ["window"],
    }
    assert configured_heads(fake_config(kv_heads=8, text=step), NAME, is_window=True, is_draft=False) == [
        ("attention_other_setting.num_attention_groups", 3),
        ("total_num_kv_heads", 8),
    ]
    searched = {"num_attention_heads": 32, "block_configs": [block(8)] * 3 + [block(16), block(None)]}
    assert configured_heads(fake_config(kv_heads=4, text=searched), NAME, is_window=False, is_draft=False) == [
        ("block_configs.attention.n_heads_in_group", 2),
        ("total_num_kv_heads", 4),
    ]
    mimo = fake_config(kv_heads=4, text={"swa_num_key_value_heads": 8})
    assert configured_heads(mimo, NAME, is_window=True, is_draft=False)[0] == ("swa_num_key_value_heads", 8)
    assert configured_heads(mimo, NAME, is_window=False, is_draft=False) == [("total_num_kv_heads", 4)]
    eagle = fake_config(kv_heads=4, speculative=models.speculative(draft_heads=2))
    assert configured_heads(eagle, NAME, is_window=False, is_draft=True) == [("total_num_kv_heads", 2)]


def test_each_layer_has_the_heads_of_its_own_architecture() -> None:
    """As vLLM resolves Gemma-4: `model_arch_config[layer]`."""
    from vllm.config.model_arch import ModelArchitectureConfig

    layers = [
        ModelArchitectureConfig(["X"], "x", "x", 8, 2, 8, 8, 8, heads, 0, 0, None, False, False, None, (8, None))
        for heads in (4, 2)
    ]
    config = fake_config()
    config.model_config.model_arch_config = ModelArchitectureConfig.from_layers(layers)
    found = [
        configured_heads(config, f"model.layers.{i}.attn", is_window=False, is_draft=False)[-1][1] for i in (0, 1, 2)
    ]
    assert found == [4, 2, 4]


@pytest.mark.parametrize(
    ("held", "parts", "said", "total"),
    [(2, 4, [], 8), (3, 1, [], 3), (1, 4, [("a", 2)], 2), (1, 4, [("a", 8), ("b", 4)], 4)],
)
def test_total_heads(held: int, parts: int, said: list[tuple[str, int]], total: int) -> None:
    assert total_kv_heads(NAME, held, parts, said) == total
