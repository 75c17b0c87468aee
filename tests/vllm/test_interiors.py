"""The tables about vLLM against the installed one, and properties of a layer as vLLM keeps them."""

import re
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

pytestmark = pytest.mark.vllm
ROOT = Path(vllm.__file__).parent
NAME = "model.layers.3.self_attn.attn"
SPEC = FullAttentionSpec(block_size=128, num_kv_heads=2, head_size=64, dtype=torch.bfloat16)


def lines_of(source: str) -> list[tuple[Path, int]]:
    """The files and lines that a source names; a later file may leave out the folder of the one before."""
    found, folder = [], ROOT
    for part in source.split(", "):
        path, _, line = part.partition(":")
        file = ROOT / path if (ROOT / path).exists() else folder / path
        folder = file.parent
        found.append((file, int(line.split(",")[0] or 1) if line else 1))
    return found


@pytest.mark.parametrize(
    "known", table.INTERIORS, ids=lambda known: f"{known.backends[0]}-{known.cache_dtypes[0]}-{known.platforms[0]}"
)
def test_sources_of_interiors_are_there(known: table.KnownInterior) -> None:
    for file, line in lines_of(known.source):
        assert file.is_file(), file
        assert len(file.read_text().splitlines()) >= line


# What the line says on which most depends: K, then V, in a cell.
@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("v1/attention/backends/flash_attn.py:1252", "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"),
        ("v1/attention/backends/hpc_attn.py:443", "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"),
        ("v1/attention/backends/rocm_aiter_fa.py:1519", "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"),
        ("v1/attention/backends/triton_attn.py:627", "kv_cache.split(hs, dim=-1)"),
        ("v1/attention/backends/flashinfer.py:2168", "kv_cache_permute.split(hs, dim=-1)"),
        ("v1/attention/backends/b12x.py:886", "kv_cache.unbind(1)"),
        ("v1/attention/backends/cpu_attn.py:415", "kv_cache.chunk(2, dim=2)"),
        ("models/deepseek_v41/compressor.py:77", "pos % CAPACITY"),
        ("models/deepseek_v41/common/ops/fused_compress_quant_cache.py:393", "(slot % CACHE_BLOCK) * 512"),
        ("models/deepseek_v41/common/ops/indexer_k_store.py:203", "kv_pos_in_block * TOKEN_STRIDE"),
        ("models/minimax_m3/common/ops/sparse_attn.py:191", "(head_dim + off_d[None, :]) * stride_kv_d"),
        ("models/minimax_m3/nvidia/sparse_attention_msa.py:386", "kv_cache.split(self.head_size, dim=-1)"),
        ("models/minimax_m3/common/ops/index_topk.py:164", "ik_cache_ptr"),
        ("models/glm5next/nvidia/ops/kpool_compress.py:415", "(t % RING) * HEAD_DIM"),
        ("models/qwen4_exp/nvidia/qsa.py:297", "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"),
        ("models/qwen4_exp/common/qsa_cache.py:133", "positions.remainder("),
        ("models/qwen4_exp/common/qsa_cache.py:797", "[B, N, H, C]"),
        ("models/inkling/nvidia/ops/sconv.py:92", "cache_ptr"),
        ("models/dots3_note/nvidia/attention.py:717", "kv_cache[..., : self.head_size]"),
    ],
)
def test_lines_say_what_they_are_quoted_for(source: str, said: str) -> None:
    ((file, line),) = lines_of(source)
    assert said in "\n".join(file.read_text().splitlines()[line - 2 : line + 1])


@pytest.mark.parametrize("name", table.STATES)
def test_classes_of_states_have_the_sizes_that_are_read(name: str) -> None:
    form, source = table.STATES[name]
    ((file, _),) = lines_of(source)
    text = file.read_text()
    assert re.search(rf"^class {name}\b", text, flags=re.MULTILINE)
    for attribute in FORMS[form].sizes:
        assert re.search(rf"self\.{attribute}\b(?:: int)? =", text), f"{name}.{attribute}"


def test_facts_do_not_contradict_one_another() -> None:
    seen: dict[Any, str] = {}
    for known in table.INTERIORS:
        for backend in known.backends:
            for cache_dtype in known.cache_dtypes:
                for platform in known.platforms:
                    key = (backend, cache_dtype, platform, known.packing, known.interior == "ring")
                    assert key not in seen, key
                    seen[key] = known.interior


def test_what_is_not_in_the_table_is_unknown() -> None:
    assert table.interior("FLASH_ATTN", "auto", "cuda", packing=False) == "cell"
    assert table.interior("FLASH_ATTN", "auto", "cuda", packing=True) is None
    assert table.interior("FLASH_ATTN", "nvfp4", "cuda", packing=False) is None
    assert table.interior("CPU_ATTN", "auto", "rvv", packing=False) is None
    assert table.interior("CPU_ATTN", "fp8", "amx-fp8", packing=False) is None
    assert table.interior("TURBOQUANT", "turboquant_k8v4", "cuda", packing=True) is None
    assert table.interior("CompressorBackend", "", "cuda", packing=False, ring=True) == "ring"
    assert table.state_form(("Subclass", "MambaMixer2", "MambaBase")) == "mamba2"
    assert table.state_form(("Qwen4ExpPLELayer", "MambaBase")) == "position-conv"
    assert table.state_form(("SomeNewMixer", "MambaBase")) is None


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
