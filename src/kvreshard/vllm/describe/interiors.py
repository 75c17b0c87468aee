"""Interior order of pages, for each attention backend, cache dtype and instruction set of vLLM 0.32.0.

An engine's view says (pages, head slots, states, cell); backends fill it differently. A page that is not in this table is opaque: whole
equal pages may be moved, anything else is refused. Data only: nothing here calls vLLM.

| interior | slots x cell | where a value lies |
|---|---|---|
| `cell`, `slots`, `planes-kt`, `tiles` | | as in `kinds.attention` |
| `scaled-cell` | heads x (K, its scale, V, its scale) | a token's values and their scale side by side, in bytes |
| `rows` | 1 x channels | one vector per state |
| `packed-rows` | 1 x bytes | one packed vector per state, with its scales |
| `scaled-rows` | 1 x bytes | all vectors of a kernel block, then all their scales |
| `ring` | parts x channels | one vector per entry and part; token t lies in entry t mod capacity |

The *platform* of an entry is an instruction set on CPU (`vec`, `vec16`, `amx`, or `cpu` where it does not matter), else `cuda`,
`rocm` or `xpu`. An entry holds only for pages without the backend's own packing (`head slots`, `cell bytes` of the specification), except
where `packing` is set: ROCm's `FLASH_ATTN` shuffles pages exactly when it repacks them.

How each was checked: `tests/vllm/` writes labelled values through vLLM's own code and finds where they land. Entries of GPU backends
follow the indexing of their Python code; the kernels below it were read, not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

FLOATS = ("float16", "bfloat16", "float32")
PLAIN = ("auto", *FLOATS)
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
VALUES = (*PLAIN, *FP8)
GPUS = ("cuda", "rocm", "xpu")
DENSE_LATENT = ("TRITON_MLA", "FLASHMLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "TOKENSPEED_MLA")
SPARSE_LATENT = ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90", "FLASH_ATTN_MLA_SPARSE")


@dataclass(frozen=True, slots=True)
class KnownInterior:
    """Backends that fill a page alike. `packing`: whether the backend repacks the page (its own slots or cell bytes)."""

    backends: tuple[str, ...]
    cache_dtypes: tuple[str, ...]
    platforms: tuple[str, ...]
    interior: str
    source: str
    packing: bool = False


# fmt: off
INTERIORS: tuple[KnownInterior, ...] = (
    # K and V of one head and token side by side: kv_cache.transpose(1, 2).split(head_size, dim=-1).
    KnownInterior(("FLASH_ATTN",), VALUES, ("cuda", "xpu"), "cell", "v1/attention/backends/flash_attn.py:1252"),
    KnownInterior(("FLASH_ATTN",), VALUES, ("rocm",), "cell", "v1/attention/backends/rocm_aiter_fa.py:1519"),
    KnownInterior(("FLASH_ATTN_DIFFKV",), VALUES, ("cuda",), "cell", "v1/attention/backends/flash_attn_diffkv.py:193"),
    KnownInterior(("TRITON_ATTN",), VALUES, GPUS, "cell", "v1/attention/backends/triton_attn.py:625"),
    KnownInterior(("TRITON_ATTN_DIFFKV",), VALUES, GPUS, "cell", "v1/attention/backends/triton_attn_diffkv.py:193"),
    KnownInterior(("FLASHINFER",), VALUES, ("cuda",), "cell", "v1/attention/backends/flashinfer.py:2168"),
    KnownInterior(("FLEX_ATTENTION",), PLAIN, GPUS, "cell", "v1/attention/backends/flex_attention.py:1348"),
    KnownInterior(("HPC_ATTN",), VALUES, ("cuda",), "cell", "v1/attention/backends/hpc_attn.py:443"),
    KnownInterior(("TRITON_FLASH_ATTN", "TRITON_FLASHINFER"), VALUES, ("cuda",), "cell", "v1/attention/backends/composite.py:495"),
    # [K | fp32 scale | V | fp32 scale] in one cell.
    KnownInterior(("TRITON_ATTN",), ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"), GPUS, "scaled-cell",
                  "v1/attention/backends/triton_attn.py:284,390", packing=True),
    # MiniMax-M3's block-sparse attention and Qwen4-Exp's, both by the strides of the view.
    KnownInterior(("MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA"), VALUES, ("cuda",), "cell",
                  "models/minimax_m3/common/ops/sparse_attn.py:191, models/minimax_m3/nvidia/sparse_attention_msa.py:386"),
    KnownInterior(("QWEN4_EXP_QSA_TRITON",), (*PLAIN, "fp8", "fp8_e4m3"), ("cuda",), "cell", "models/qwen4_exp/nvidia/qsa.py:297"),
    # Inkling's convolutions: the inputs of a token and head, four streams side by side, and no V.
    KnownInterior(("INKLING_SCONV_SWA",), ("",), ("cuda",), "cell", "models/inkling/nvidia/ops/sconv.py:92"),
    # Slot 0 is K, slot 1 is V, each with all heads of a token.
    KnownInterior(("B12X",), VALUES, ("cuda",), "slots", "v1/attention/backends/b12x.py:152,886", packing=True),
    # cpu_attn.py:415 makes planes; the order inside them is the operator's, found by labelled writes.
    KnownInterior(("CPU_ATTN",), VALUES, ("vec", "vec16"), "planes-kt", "v1/attention/backends/cpu_attn.py:415"),
    KnownInterior(("CPU_ATTN",), VALUES, ("amx",), "tiles", "v1/attention/backends/cpu_attn.py:415"),
    # One latent vector per token: concat_and_cache_mla.
    KnownInterior((*DENSE_LATENT, *SPARSE_LATENT), VALUES, ("cuda",), "rows", "v1/attention/backend.py:1103"),
    # Rows as wide as the windows' beside them, the latent first (dots3-note).
    KnownInterior(("DOTS3_NOTE_PADDED_MLA_SPARSE",), VALUES, ("cuda",), "rows", "models/dots3_note/nvidia/attention.py:717"),
    # Keys of sparse indexers: one vector per token, or per compressed entry.
    KnownInterior(("MINIMAX_M3_SPARSE_INDEXER",), ("",), ("cuda",), "rows", "models/minimax_m3/common/ops/index_topk.py:164"),
    KnownInterior(("QWEN4_EXP_EXP_QSA_STATE",), ("",), ("cuda",), "rows", "models/qwen4_exp/common/qsa_cache.py:797"),
    KnownInterior(("CPU_MLA",), PLAIN, ("cpu",), "rows", "v1/attention/backends/mla/cpu_mla.py:209"),
    KnownInterior(("AMX_MLA",), PLAIN, ("cpu",), "rows", "v1/attention/backends/mla/amx_mla.py:320"),
    KnownInterior(("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"), ("fp8_ds_mla", "nvfp4_ds_mla"), ("cuda",), "packed-rows",
                  "v1/attention/backends/mla/flashmla_sparse.py:80, model_executor/layers/attention/mla_attention.py:1365", packing=True),
    # Values of a kernel block, then its scales. ROCm shuffles the values in tiles.
    KnownInterior(("DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER", "DEEPSEEK_V41_SPARSE_INDEXER"), ("",), ("cuda",), "scaled-rows",
                  "models/deepseek_v32/common/kernels.py:110, models/deepseek_v41/common/ops/indexer_k_store.py:203"),
    KnownInterior(("FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41", "FLASHMLA_MEGA_ATTN_DSV41", "DEEPSEEK_SPARSE_SWA"), ("fp8_ds_mla", "nvfp4_ds_mla"), ("cuda",), "scaled-rows",
                  "models/deepseek_v4/common/ops/fused_compress_quant_cache.py:190, cache_utils.py:64, models/deepseek_v41/common/ops/fused_compress_quant_cache.py:393", packing=True),
    KnownInterior(("FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41", "DEEPSEEK_SPARSE_SWA"), VALUES, ("cuda",), "rows",
                  "models/deepseek_v4/attention.py:856, v1/attention/backends/mla/sparse_swa.py:116"),
    KnownInterior(("CompressorBackend",), ("",), ("cuda",), "rows", "models/deepseek_v4/common/ops/save_partial_states.py"),
    KnownInterior(("CompressorBackend",), ("",), ("cuda",), "ring", "models/deepseek_v41/compressor.py:77"),
    KnownInterior(("KPOOL_TAIL",), ("",), ("cuda",), "ring", "models/glm5next/nvidia/ops/kpool_compress.py:415"),
    KnownInterior(("QWEN4_EXP_EXP_QSA_STATE",), ("",), ("cuda",), "ring", "models/qwen4_exp/common/qsa_cache.py:133"),
)
# fmt: on

# Packed rows of latent caches, their scales among the values.
PACKED_ROW_BYTES: Mapping[str, int] = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
# Cell bytes of DeepSeek-V4's and V4.1's latents -> values, scales behind all values, what they are.
V4_ROWS: Mapping[int, tuple[int, int, str]] = {
    584: (576, 8, "fp8_ds_mla"),
    528: (512, 16, "mxfp8/scale-per-32"),
    288: (256, 32, "nvfp4/scale-per-16"),
}
# Parts of a token in a ring, where there are several (`models/glm5next/common/attention.py:157`).
RING_PARTS: Mapping[str, tuple[str, ...]] = {"KPOOL_TAIL": ("k", "gate")}
# Cell bytes of an indexer -> values, scales, what they are.
INDEXER_ROWS: Mapping[int, tuple[int, int, str]] = {
    132: (128, 4, "fp8_e4m3/scale-per-token"),
    68: (64, 4, "mxfp4/scale-per-32"),
}

STATES: Mapping[str, tuple[str, str]] = {
    "MambaMixer": ("mamba1", "model_executor/layers/mamba/mamba_mixer.py:418"),
    "MambaMixer2": ("mamba2", "model_executor/layers/mamba/mamba_mixer2.py:1124"),
    "ShortConv": ("short-conv", "model_executor/layers/mamba/short_conv.py:351"),
    "LinearAttention": ("linear", "model_executor/layers/mamba/linear/base.py:63"),
    "QwenGatedDeltaNetAttention": ("gated-delta", "model_executor/layers/mamba/gdn/qwen_gdn_linear_attn.py:455"),
    "OlmoHybridGatedDeltaNetAttention": ("gated-delta", "model_executor/layers/mamba/gdn/olmo_gdn_linear_attn.py:55"),
    "KimiGatedDeltaNetAttention": ("kimi-delta", "model_executor/layers/mamba/gdn/kimi_gdn_linear_attn.py:166"),
    "KimiK3DeltaAttention": ("kimi-delta", "models/kimi_k3/nvidia/kda.py:564"),
    "Qwen4ExpPLELayer": ("position-conv", "models/qwen4_exp/nvidia/ple_layer.py:181"),
    "Glm5NextLinearAttention": ("kimi-delta", "models/glm5next/common/kda.py:189"),
    "BailingMoeV3KimiDeltaAttention": ("kimi-delta", "model_executor/models/bailing_moe_v3.py:627"),
}
"""Class of a state layer, or of one it derives from -> the form of its state, and where that is read from."""


def interior(backend: str, cache_dtype: str, platform: str, *, packing: bool, ring: bool = False) -> str | None:
    """How the backend fills a page; None where nothing is known.

    `packing`: whether the specification has slots or cell bytes of the backend's own. `cache_dtype` is empty for caches that
    do not follow the engine's choice.
    """
    for known in INTERIORS:
        if (
            backend in known.backends
            and cache_dtype in known.cache_dtypes
            and platform in known.platforms
            and packing == known.packing
            and ring == (known.interior == "ring")
        ):
            return known.interior
    return None


def state_form(class_names: tuple[str, ...]) -> str | None:
    """The form of a state layer's state, from its class and those it derives from; None where nothing is known."""
    return next((STATES[name][0] for name in class_names if name in STATES), None)
