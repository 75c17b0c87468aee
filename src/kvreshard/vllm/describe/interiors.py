"""Interior order of pages, for each attention backend, cache dtype, instruction set and release of vLLM.

An engine's view says (pages, head slots, states, cell); backends fill it differently. A page that is not in this table is opaque: whole
equal pages may be moved, anything else is refused. Data only: nothing here calls vLLM.

| interior | slots x cell | where a value lies |
|---|---|---|
| `cell`, `slots`, `planes-kt`, `tiles` | | as in `kinds.attention` |
| `scaled-cell` | heads x (K, its scale, V, its scale) | a token's values and their scale side by side, in bytes |
| `rows` | 1 x channels | one vector per state |
| `quantised-rows` | 1 x bytes | one vector per state with its scales, as `ROWS` says |
| `ring` | parts x channels | one vector per entry and part; token t lies in entry t mod capacity |

The *platform* of an entry is an instruction set on CPU (`vec`, `vec16`, `amx`, or `cpu` where it does not matter), else `cuda`,
`rocm` or `xpu`. An entry holds only for pages without the backend's own packing (`head slots`, `cell bytes` of the specification), except
where `packing` is set: ROCm's `FLASH_ATTN` shuffles pages exactly when it repacks them.

An entry holds in the releases from `since` to `until`, and in no other: what a release fills in another way has another entry, or none.
Its `quotes` are the expressions on which most depends. A test finds them in the vLLM that is installed.

How each was checked: `tests/vllm/` writes labelled values through vLLM's own code and finds where they land. Entries of GPU backends
follow the indexing of their Python code, compared between the releases (`docs/design/0066`); the kernels
below it were read, not run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

FLOATS = ("float16", "bfloat16", "float32")
PLAIN = ("auto", *FLOATS)
FP8 = ("fp8", "fp8_e4m3", "fp8_e5m2")
VALUES = (*PLAIN, *FP8)
GPUS = ("cuda", "rocm", "xpu")
DENSE_LATENT = ("TRITON_MLA", "FLASHMLA", "CUTLASS_MLA", "FLASH_ATTN_MLA", "FLASHINFER_MLA", "TOKENSPEED_MLA")
SPARSE_LATENT = ("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM90", "FLASH_ATTN_MLA_SPARSE")
DS_MLA = ("fp8_ds_mla", "nvfp4_ds_mla")

Minor = tuple[int, int]
Quote = tuple[str, str]
"""A file of vLLM, and an expression in it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """What is known of the releases from `since` to `until`, both included; `until` None: also of the newest."""

    quotes: tuple[Quote, ...]
    since: Minor = (0, 30)
    until: Minor | None = None

    def holds_in(self, release: Minor) -> bool:
        """Whether it is true of this release."""
        return self.since <= release and (self.until is None or release <= self.until)


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownInterior(Known):
    """Backends that fill a page alike. `packing`: whether the backend repacks the page (its own slots or cell bytes)."""

    backends: tuple[str, ...]
    cache_dtypes: tuple[str, ...]
    platforms: tuple[str, ...]
    interior: str
    packing: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantisedRow(Known):
    """A vector of `value_bytes` with `scale_bytes` of scales; `encoding`: what they are. `cache_dtypes`: empty for keys of an indexer.

    `is_inline`: the scales lie in the vector's own row, which is moved as one. Else they lie behind all vectors of a kernel block.
    `has_mx_scales`: the row only of devices whose kernels take keys of an indexer with MX scales, or only of the others; None: of all.
    """

    cache_dtypes: tuple[str, ...]
    value_bytes: int
    scale_bytes: int
    encoding: str
    is_inline: bool = False
    has_mx_scales: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownState(Known):
    """The form of a layer's state, one of `state_forms`. The first quote's file has the layer's class."""

    form: str


# fmt: off
def _interior(backends: tuple[str, ...], dtypes: tuple[str, ...], platforms: tuple[str, ...], interior: str, *quotes: Quote,
              packing: bool = False, since: Minor = (0, 30)) -> KnownInterior:
    return KnownInterior(backends=backends, cache_dtypes=dtypes, platforms=platforms, interior=interior, quotes=quotes, packing=packing,
                         since=since)


BACKENDS = "v1/attention/backends"
SPLIT = "kv_cache.transpose(1, 2).split(self.head_size, dim=-1)"
V41_ROWS = "models/deepseek_v41/common/ops/fused_compress_quant_cache.py"

INTERIORS: tuple[KnownInterior, ...] = (
    # K and V of one head and token side by side.
    _interior(("FLASH_ATTN",), VALUES, ("cuda", "xpu"), "cell", (f"{BACKENDS}/flash_attn.py", SPLIT)),
    _interior(("FLASH_ATTN",), VALUES, ("rocm",), "cell", (f"{BACKENDS}/rocm_aiter_fa.py", f"return {SPLIT}"),
              (f"{BACKENDS}/rocm_aiter_fa.py", "if not rocm_aiter_ops.is_shuffle_kv_cache_enabled(): return spec")),
    _interior(("FLASH_ATTN_DIFFKV",), VALUES, ("cuda",), "cell", (f"{BACKENDS}/flash_attn_diffkv.py", SPLIT)),
    _interior(("TRITON_ATTN",), VALUES, GPUS, "cell", (f"{BACKENDS}/triton_attn.py", "kv_cache = kv_cache.transpose(1, 2) hs = self.head_size key_cache, value_cache = kv_cache.split(hs, dim=-1)")),
    _interior(("TRITON_ATTN_DIFFKV",), VALUES, GPUS, "cell", (f"{BACKENDS}/triton_attn_diffkv.py", "value_cache = kv_cache[..., head_size_qk : head_size_qk + head_size_v]")),
    _interior(("FLASHINFER",), VALUES, ("cuda",), "cell", (f"{BACKENDS}/flashinfer.py", "kv_cache_permute.split(hs, dim=-1)")),
    _interior(("FLEX_ATTENTION",), PLAIN, GPUS, "cell", (f"{BACKENDS}/flex_attention.py", "kv_cache = kv_cache.transpose(1, 2) hs = self.head_size key_cache, value_cache = kv_cache.split(hs, dim=-1)")),
    _interior(("HPC_ATTN",), VALUES, ("cuda",), "cell", (f"{BACKENDS}/hpc_attn.py", SPLIT)),
    _interior(("TRITON_FLASH_ATTN", "TRITON_FLASHINFER"), VALUES, ("cuda",), "cell",
              (f"{BACKENDS}/composite.py", "Composite backends require the same KV cache spec"),
              (f"{BACKENDS}/triton_flash_attn.py", 'backend_name="TRITON_FLASH_ATTN"'), (f"{BACKENDS}/triton_flashinfer.py", 'backend_name="TRITON_FLASHINFER"')),
    # [K | fp32 scale | V | fp32 scale] in one cell.
    _interior(("TRITON_ATTN",), ("int8_per_token_head", "fp8_per_token_head", "int4_per_token_head"), GPUS, "scaled-cell",
              (f"{BACKENDS}/triton_attn.py", "content = (hs_k + hs_v) * get_dtype_size(spec.dtype) + 2 * scale_bytes"),
              (f"{BACKENDS}/triton_attn.py", "[K(hs) | K_scale(pad) | V(hs) | V_scale(pad)]"), packing=True),
    # MiniMax-M3's block-sparse attention and Qwen4-Exp's, both by the strides of the view.
    _interior(("MINIMAX_M3_SPARSE", "CUTLASS_MSA", "TRITON_MSA"), VALUES, ("cuda",), "cell",
              ("models/minimax_m3/common/ops/sparse_attn.py", "+ (head_dim + off_d[None, :]) * stride_kv_d"),
              ("models/minimax_m3/nvidia/sparse_attention_msa.py", "kv_cache.split(self.head_size, dim=-1)")),
    _interior(("QWEN4_EXP_QSA_TRITON",), (*PLAIN, "fp8", "fp8_e4m3"), ("cuda",), "cell", ("models/qwen4_exp/nvidia/qsa.py", SPLIT)),
    # Inkling's convolutions: the inputs of a token and head, four streams side by side, and no V.
    _interior(("INKLING_SCONV_SWA",), ("",), ("cuda",), "cell",
              ("models/inkling/nvidia/ops/sconv.py", "+ head[None, :] * stride_c_h + (safe_slot % N)[:, None] * stride_c_n + cd[None, :] * stride_c_d")),
    # Slot 0 is K, slot 1 is V, each with all heads of a token.
    _interior(("B12X",), VALUES, ("cuda",), "slots", (f"{BACKENDS}/b12x.py", "key_cache, value_cache = kv_cache.unbind(1)"), packing=True),
    # Planes of K and V; the order inside them is the operator's, found by labelled writes.
    _interior(("CPU_ATTN",), VALUES, ("vec", "vec16"), "planes-kt", (f"{BACKENDS}/cpu_attn.py", "key_cache, value_cache = kv_cache.chunk(2, dim=2)")),
    _interior(("CPU_ATTN",), VALUES, ("amx",), "tiles", (f"{BACKENDS}/cpu_attn.py", "key_cache, value_cache = kv_cache.chunk(2, dim=2)"),
              (f"{BACKENDS}/cpu_attn.py", "if supports_amx and dtype in (torch.bfloat16,) and block_size % 32 == 0:")),
    # One latent vector per token.
    _interior((*DENSE_LATENT, *SPARSE_LATENT), VALUES, ("cuda",), "rows",
              ("v1/attention/backend.py", "ops.concat_and_cache_mla( kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten(),")),
    # Rows as wide as the windows' beside them, the latent first (dots3-note).
    _interior(("DOTS3_NOTE_PADDED_MLA_SPARSE",), VALUES, ("cuda",), "rows", ("models/dots3_note/nvidia/attention.py", "return kv_cache[..., : self.head_size]")),
    # Keys of sparse indexers: one vector per token, or per compressed entry.
    _interior(("MINIMAX_M3_SPARSE_INDEXER",), ("",), ("cuda",), "rows",
              ("models/minimax_m3/common/ops/index_topk.py", "ik_cache_ptr + page * stride_ik_blk + off_k[None, :] * stride_ik_pos")),
    _interior(("QWEN4_EXP_EXP_QSA_STATE",), ("",), ("cuda",), "rows", ("models/qwen4_exp/common/qsa_cache.py", "Adapt the unified [B, H, N, C] view to QSA's [B, N, H, C].")),
    _interior(("CPU_MLA",), PLAIN, ("cpu",), "rows", (f"{BACKENDS}/mla/cpu_mla.py", "flat[slots, kv_lora_rank:] = k_pe_sq.view(-1, pe_dim).to(target_dtype)")),
    _interior(("AMX_MLA",), PLAIN, ("cpu",), "rows", (f"{BACKENDS}/mla/amx_mla.py", "ops.amx_mla_concat_and_cache( kv_c_normed, k_pe.squeeze(1), kv_cache, slot_mapping.flatten() )")),
    _interior(("FLASHMLA_SPARSE", "FLASHINFER_MLA_SPARSE_SM120"), DS_MLA, ("cuda",), "quantised-rows",
              ("model_executor/layers/attention/mla_attention.py", 'state_content_bytes={"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}.get('), packing=True),
    # ROCm shuffles the values of an indexer in tiles.
    _interior(("DEEPSEEK_V32_INDEXER", "DEEPSEEK_V4_INDEXER", "DEEPSEEK_V41_INDEXER"), ("",), ("cuda",), "quantised-rows",
              (f"{BACKENDS}/mla/indexer.py", 'return "DEEPSEEK_V41_INDEXER"'),
              ("models/deepseek_v41/common/ops/indexer_k_store.py", "val_ptr = cache_block_ptr + kv_pos_in_block * TOKEN_STRIDE")),
    _interior(("DEEPSEEK_V41_SPARSE_INDEXER",), ("",), ("cuda",), "quantised-rows", (f"{BACKENDS}/mla/sparse_indexer.py", 'return "DEEPSEEK_V41_SPARSE_INDEXER"'),
              since=(0, 31)),
    _interior(("FLASHMLA_SPARSE_DSV4", "FLASHMLA_SPARSE_DSV41", "DEEPSEEK_SPARSE_SWA"), DS_MLA, ("cuda",), "quantised-rows",
              ("models/deepseek_v4/sparse_mla.py", 'return "FLASHMLA_SPARSE_DSV4"'), ("models/deepseek_v41/sparse_mla.py", 'return "FLASHMLA_SPARSE_DSV41"'),
              (V41_ROWS, "page = cache + (slot // CACHE_BLOCK).to(tl.int64) * CACHE_STRIDE"), packing=True),
    _interior(("FLASHMLA_MEGA_ATTN_DSV41",), DS_MLA, ("cuda",), "quantised-rows", ("models/deepseek_v41/sparse_mla.py", 'return "FLASHMLA_MEGA_ATTN_DSV41"'),
              packing=True, since=(0, 31)),
    _interior(("FLASHINFER_MLA_SPARSE_DSV4", "FLASHINFER_MLA_SPARSE_DSV41", "DEEPSEEK_SPARSE_SWA"), VALUES, ("cuda",), "rows",
              (f"{BACKENDS}/mla/sparse_swa.py", "# [B, H=1, N, C] -> [B, N, C] self.kv_cache = kv_cache.squeeze(1)")),
    _interior(("CompressorBackend",), ("",), ("cuda",), "rows",
              ("models/deepseek_v4/common/ops/save_partial_states.py", "+ block_idx * state_cache_stride0 + pos_in_block * state_cache_stride1")),
    _interior(("CompressorBackend",), ("",), ("cuda",), "ring", ("models/deepseek_v41/compressor.py", "slot = block.to(tl.int64) * CAPACITY + pos % CAPACITY")),
    # Before, the ring was a window by its class, which is refused, and its length that of a pool.
    _interior(("KPOOL_TAIL",), ("",), ("cuda",), "ring", ("models/glm5next/nvidia/ops/kpool_compress.py", "(t % RING) * HEAD_DIM"),
              ("models/glm5next/common/attention.py", "return CircularBufferSpec("), since=(0, 32)),
    _interior(("QWEN4_EXP_EXP_QSA_STATE",), ("",), ("cuda",), "ring", ("models/qwen4_exp/common/qsa_cache.py", "* compressor_state_size + positions.remainder( compressor_state_size )")),
)


def _row(dtypes: tuple[str, ...], values: int, scales: int, encoding: str, *quotes: Quote, inline: bool = False, mx: bool | None = None,
         since: Minor = (0, 30), until: Minor | None = None) -> QuantisedRow:
    return QuantisedRow(cache_dtypes=dtypes, value_bytes=values, scale_bytes=scales, encoding=encoding, quotes=quotes, is_inline=inline,
                        has_mx_scales=mx, since=since, until=until)


V32_KERNELS = "models/deepseek_v32/common/kernels.py"
ROWS: tuple[QuantisedRow, ...] = (
    # DeepSeek-V3.2: 512 values, 4 float32 scales, 64 rotary values. Since 0.31 scales are powers of two, which some kernels rely on.
    _row(("fp8_ds_mla",), 640, 16, "fp8_ds_mla/any-scale", (V32_KERNELS, "tile_scale = tl.maximum(tile_amax * (1.0 / 448.0), 1.1754944e-38)"), inline=True, until=(0, 30)),
    _row(("fp8_ds_mla",), 640, 16, "fp8_ds_mla", (V32_KERNELS, "tile_scale = tl.math.exp2(tl.math.ceil(tl.math.log2(tile_scale)))"), inline=True, since=(0, 31)),
    _row(("nvfp4_ds_mla",), 320, 32, "nvfp4_ds_mla", (f"{BACKENDS}/mla/flashmla_sparse.py", "stored permuted (an 8x4 -> 4x8 transpose"), inline=True),
    # DeepSeek-V4 and V4.1.
    _row(DS_MLA, 576, 8, "fp8_ds_mla", (V41_ROWS, "scales = page + CACHE_BLOCK * 576 + (slot % CACHE_BLOCK) * 8"),
         ("models/deepseek_v4/common/ops/cache_utils.py", "[64*576, 64*576 + 64*8): Scales, each token has 8 uint8 scales")),
    _row(DS_MLA, 512, 16, "mxfp8/scale-per-32", (V41_ROWS, "scales = page + CACHE_BLOCK * 512 + (slot % CACHE_BLOCK) * 16"), until=(0, 32)),
    _row(DS_MLA, 512, 16, "mxfp8/scale-per-32/scales-in-row", (V41_ROWS, "values = page + (slot % CACHE_BLOCK) * 528 scales = values + 512"), inline=True, since=(0, 33)),
    _row(DS_MLA, 256, 32, "nvfp4/scale-per-16", (V41_ROWS, "scales = page + CACHE_BLOCK * 256 + (slot % CACHE_BLOCK) * 32"), since=(0, 31), until=(0, 32)),
    _row(DS_MLA, 256, 32, "nvfp4/scale-per-16/scales-in-row", (V41_ROWS, "values = page + (slot % CACHE_BLOCK) * 288"), inline=True, since=(0, 33)),
    # Keys of indexers.
    _row(("",), 128, 4, "fp8_e4m3/scale-per-token", (V32_KERNELS, "scale_byte_off = block_start + cache_block_size * HEAD_DIM + block_offset * 4"),
         ("models/glm5next/nvidia/ops/kpool_compress.py", "tl.store(buf_fp32_ptr + out_s_offset, scale"), mx=False),
    _row(("",), 128, 4, "fp8_e4m3/four-ue8m0-per-token", (V32_KERNELS, "if MX_SCALE: scale = pack_ue8m0_x4(scale)"),
         ("v1/attention/ops/common.py", "((scale.to(tl.int32, bitcast=True) >> 23) & 0xFF) * 0x01010101"), mx=True, since=(0, 33)),
    _row(("",), 64, 4, "mxfp4/scale-per-32", ("models/deepseek_v41/common/ops/indexer_k_store.py", "+ kv_cache_block_size * TOKEN_STRIDE + kv_pos_in_block * SCALE_DIM")),
)

# Parts of a token in a ring, where there are several (`models/glm5next/common/attention.py`, `Glm5NextTailCache`).
RING_PARTS: Mapping[str, tuple[str, ...]] = {"KPOOL_TAIL": ("k", "gate")}


def _state(form: str, file: str, shape: str = "", since: Minor = (0, 30)) -> KnownState:
    return KnownState(form=form, quotes=((file, f"MambaStateShapeCalculator.{shape or form}_state_shape("),), since=since)


MAMBA = "model_executor/layers/mamba"
STATES: Mapping[str, KnownState] = {
    "MambaMixer": _state("mamba1", f"{MAMBA}/mamba_mixer.py"),
    "MambaMixer2": _state("mamba2", f"{MAMBA}/mamba_mixer2.py"),
    "ShortConv": _state("short-conv", f"{MAMBA}/short_conv.py", "short_conv"),
    "LinearAttention": _state("linear", f"{MAMBA}/linear/base.py", "linear_attention"),
    "QwenGatedDeltaNetAttention": _state("gated-delta", f"{MAMBA}/gdn/qwen_gdn_linear_attn.py", "gated_delta_net"),
    "OlmoHybridGatedDeltaNetAttention": _state("gated-delta", f"{MAMBA}/gdn/olmo_gdn_linear_attn.py", "gated_delta_net"),
    "KimiGatedDeltaNetAttention": _state("kimi-delta", f"{MAMBA}/gdn/kimi_gdn_linear_attn.py", "kda"),
    "KimiK3DeltaAttention": _state("kimi-delta", "models/kimi_k3/nvidia/kda.py", "kda"),
    "Qwen4ExpPLELayer": _state("position-conv", "models/qwen4_exp/nvidia/ple_layer.py", "short_conv"),
    "Glm5NextLinearAttention": _state("kimi-delta", "models/glm5next/common/kda.py", "kda", since=(0, 31)),
    "BailingMoeV3KimiDeltaAttention": _state("kimi-delta", "model_executor/models/bailing_moe_v3.py", "kda"),
}
"""Class of a state layer, or of one it derives from -> the form of its state."""
# fmt: on


def interior(
    backend: str, cache_dtype: str, platform: str, release: Minor, *, packing: bool, ring: bool = False
) -> str | None:
    """How the backend fills a page in this release; None where nothing is known.

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
            and known.holds_in(release)
        ):
            return known.interior
    return None


def quantised_row(cache_dtype: str, num_bytes: int, has_mx_scales: bool, release: Minor) -> QuantisedRow | None:
    """The row of so many bytes in this release; None where it is not known."""
    for row in ROWS:
        if (
            cache_dtype in row.cache_dtypes
            and row.value_bytes + row.scale_bytes == num_bytes
            and row.has_mx_scales in (None, has_mx_scales)
            and row.holds_in(release)
        ):
            return row
    return None


def state_form(class_names: Iterable[str], release: Minor) -> str | None:
    """The form of a state layer's state in this release, from its class and those it derives from; None where nothing is known."""
    known = next((STATES[name] for name in class_names if name in STATES), None)
    return known.form if known is not None and known.holds_in(release) else None
