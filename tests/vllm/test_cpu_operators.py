"""Places of values in vLLM's CPU build: its own operators write labels, which are found at the described addresses.

Operators round values, so a label is written as its binary digits: one pass per digit, the value zero or one. AMX tiles are
filled here on any processor; only computing with them needs one that has them.
"""

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import numpy as np
import torch
from tests.vllm import models, writers
from tests.vllm.engines import Side, build, check_addresses, give_pages, label
from vllm import _custom_ops as ops
from vllm.platforms import current_platform
from vllm.v1.attention.backends.mla.cpu_mla import CPUMLAImpl

from kvreshard.vllm.describe.layer_info import LayerInfo

pytestmark = pytest.mark.vllm
TOKENS = 75
# vLLM has three builds of its operators, and takes that of the processor (`CpuPlatform.import_kernels`).
FP8 = pytest.mark.skipif(
    not torch.cpu._is_avx512_supported(), reason="vLLM has no fp8 caches on processors without AVX-512"
)
AMX = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported(), reason="vLLM has no operators for AMX on processors without AVX-512 BF16"
)


@pytest.fixture(scope="module", autouse=True)
def kernels() -> None:
    current_platform.import_kernels()


def collect_bits(side: Side, rank: int, layer: str, shape: tuple[int, ...], operate: Any) -> Any:
    """Numbers 1, 2, ... of values of `shape`, found as they lie: an array like the layer's cache of where each number is."""
    cache = side.caches[rank][layer]
    numbers = torch.arange(1, int(np.prod(shape)) + 1).reshape(shape)
    found = torch.zeros(cache.shape, dtype=torch.int64)
    for bit in range(int(numbers.max()).bit_length()):
        cache.zero_()
        operate(((numbers >> bit) & 1).to(torch.float32))
        found += (cache != 0).to(torch.int64) << bit
    return found


def relabel(side: Side, rank: int, layer: str, found: Any, wanted: np.ndarray[Any, Any]) -> None:
    """Write the label of number n wherever number n was found."""
    view = writers.as_bytes(side.caches[rank][layer])
    where = found.numpy()
    flat = wanted.reshape(-1, wanted.shape[-1])
    view[where > 0] = flat[where[where > 0] - 1]


def cpu_attention_writer(cache: Any, slots: Any, isa: str, dtype: Any, cache_dtype: str) -> Any:
    """The write of `CPUAttentionBackendImpl.forward` for keys and values, stacked."""
    blocks, num_heads, n, _ = cache.size()
    key_cache, value_cache = cache.view((blocks, num_heads, n * 2, -1)).chunk(2, dim=2)

    def operate(values: Any) -> None:
        k, v = (part.contiguous().to(dtype) for part in values.unbind(0))
        scales = {"k_scale": 1.0, "v_scale": 1.0}
        ops.cpu_attn_reshape_and_cache(k, v, key_cache, value_cache, slots, isa, **scales, kv_cache_dtype=cache_dtype)

    return operate


@pytest.mark.parametrize(
    ("isa", "dtype", "cache_dtype", "bs", "head_size"),
    [
        ("vec", torch.float32, "auto", 128, 64),
        ("vec", torch.bfloat16, "auto", 32, 32),
        ("vec", torch.float16, "auto", 64, 96),
        pytest.param("vec", torch.bfloat16, "fp8", 32, 64, marks=FP8),
        pytest.param("vec", torch.float32, "fp8_e5m2", 64, 32, marks=FP8),
        ("vec16", torch.float32, "auto", 32, 80),
        ("vec16", torch.bfloat16, "auto", 64, 112),
        pytest.param("amx", torch.bfloat16, "auto", 32, 32, marks=AMX),
        pytest.param("amx", torch.bfloat16, "auto", 96, 64, marks=AMX),
        pytest.param("amx", torch.bfloat16, "fp8", 64, 32, marks=AMX),
        pytest.param("amx", torch.bfloat16, "fp8_e5m2", 32, 64, marks=AMX),
    ],
)
@pytest.mark.parametrize("tp", [1, 2])
def test_cpu_attention(isa: str, dtype: Any, cache_dtype: str, bs: int, head_size: int, tp: int) -> None:
    info = LayerInfo("CPU_ATTN", cache_dtype, isa, scales=(1.0, 1.0) if cache_dtype != "auto" else None)
    stored = dtype if cache_dtype == "auto" else torch.uint8
    layers = {models.name(i): models.attention(2, head_size, bs=bs, dtype=stored, info=info) for i in range(2)}
    side = build("prefill", layers, tp=tp, blocks=6, config={"kv_heads": 2})
    give_pages(side, TOKENS, np.random.default_rng(3))
    slots = torch.from_numpy(np.array(side.tables["g0"])[np.arange(TOKENS) // bs] * bs + np.arange(TOKENS) % bs)
    for rank, place in enumerate(side.places):
        heads = writers.heads_of(place, 2)
        for layer in layers:
            cache = side.caches[rank][layer]
            operate = cpu_attention_writer(cache, slots, isa, dtype, cache_dtype)
            found = collect_bits(side, rank, layer, (2, TOKENS, len(heads), head_size), operate)
            grid = np.ix_(np.arange(TOKENS), heads, np.arange(head_size))
            wanted = np.stack([label(f"{layer}.{part}", cache.element_size(), *grid) for part in "kv"])
            cache.zero_()
            relabel(side, rank, layer, found, wanted)
    assert check_addresses(side, TOKENS) == tp * 2 * 2 * TOKENS * (2 // tp) * head_size


@pytest.mark.parametrize("backend", ["CPU_MLA", pytest.param("AMX_MLA", marks=AMX)])
def test_cpu_latent_attention(backend: str) -> None:
    dtype, bs = torch.bfloat16, 16 if backend == "CPU_MLA" else 32
    layer = models.name(0)
    side = build("prefill", {layer: models.mla(576, bs=bs, backend=backend, platform="cpu")}, blocks=8)
    give_pages(side, TOKENS, np.random.default_rng(4))
    cache = side.caches[0][layer].squeeze(1)
    slots = torch.from_numpy(np.array(side.tables["g0"])[np.arange(TOKENS) // bs] * bs + np.arange(TOKENS) % bs)

    def operate(values: Any) -> None:
        latent, rope = (part.contiguous().to(dtype) for part in values.split([512, 64], dim=1))
        if backend == "CPU_MLA":
            CPUMLAImpl.do_kv_cache_update(SimpleNamespace(), latent, rope.unsqueeze(1), cache, slots, "auto", None)
        else:
            ops.amx_mla_concat_and_cache(latent, rope, cache, slots)

    found = collect_bits(side, 0, layer, (TOKENS, 576), operate)
    side.caches[0][layer].zero_()
    relabel(side, 0, layer, found, label(f"{layer}.latent", 2, np.arange(TOKENS)[:, None], np.arange(576)))
    assert check_addresses(side, TOKENS) == TOKENS * 576
