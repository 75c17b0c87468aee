"""Records caches as vLLM lays them out for the backends of a GPU: `python -m bench.gpu.record_views` writes views.json (wants .venv-vllm).

vLLM's own functions size and view the caches of small models here; what they make, and what the connector describes of it, goes to a file,
so that a machine without vLLM can make the same views in a device's memory. `tests/vllm/test_recorded_views.py` holds the file to vLLM.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.vllm import models
from tests.vllm.engines import Side, build, give_pages
from vllm.model_executor.layers.mamba import mamba_utils

from kvreshard.model import wire

FILE = Path(__file__).with_name("views.json")
TOKENS = 150


def _attention() -> tuple[Side, Side]:
    return (
        build("prefill", models.llama(), tp=2, order="LBNHC", config={"kv_heads": 4}, blocks=20),
        build("decode", models.llama(), tp=4, order="LBHNC", config={"kv_heads": 4}, blocks=20),
    )


def _pages() -> tuple[Side, Side]:
    return (
        build("prefill", models.llama(bs=16), order="LBNHC", blocks=20),
        build("decode", models.llama(bs=48), tp=2, order="BLHNC", blocks=20),
    )


def _windows() -> tuple[Side, Side]:
    config = {"text": {"swa_num_key_value_heads": 8}, "kv_heads": 2}
    return (
        build("prefill", models.gemma4(), tp=1, order="LBHNC", blocks=60, config=config),
        build("decode", models.gemma4(), tp=4, order="BLHNC", blocks=60, config=config),
    )


def _latent_and_draft() -> tuple[Side, Side]:
    target = {models.name(i): models.mla(576, bs=64) for i in range(3)}
    layers = {**target, models.name(3): models.attention(4, 16, bs=64)}
    options = {"num_layers": 3, "speculative": models.speculative(draft_heads=4), "kv_heads": 4}
    return (
        build("prefill", layers, tp=4, order="LBNHC", config=options, blocks=24),
        build("decode", layers, tp=2, order="BLHNC", config=options, blocks=24),
    )


def _fp8_latent() -> tuple[Side, Side]:
    options = {"dtype": torch.uint8, "state_content_bytes": 656, "backend": "FLASHMLA_SPARSE"}
    layers = [
        {models.name(i): models.mla(576, bs=bs, cache_dtype="fp8_ds_mla", **options) for i in range(2)}
        for bs in (64, 32)
    ]
    return build("prefill", layers[0], order="LBHNC", tp=2), build("decode", layers[1], order="LBNHC")


def _states() -> tuple[Side, Side]:
    mamba_utils.get_conv_state_layout = lambda: "DS"
    layers = {models.name(i, "mixer"): models.mamba2(8, 4, 4, 6, 4, dim_first=True) for i in (0, 1, 3)}
    layers[models.name(2)] = models.attention(4, 8, bs=32)
    return tuple(
        build(name, layers, tp=tp, order=order, blocks=30, config={"kv_heads": 4})
        for name, tp, order in (("prefill", 1, "LBHNC"), ("decode", 2, "LBNHC"))
    )  # type: ignore[return-value]


CASES = {
    "attention, NHD TP 2 -> HND TP 4": _attention,
    "pages of 16 -> 48 tokens": _pages,
    "windows and full attention, TP 1 -> 4": _windows,
    "a latent with a draft of keys and values, TP 4 -> 2": _latent_and_draft,
    "packed fp8 latents, pages of 64 -> 32": _fp8_latent,
    "Mamba-2 states beside attention, TP 1 -> 2": _states,
}


def record() -> dict[str, Any]:
    """Every case: both engines and the block tables of a request."""
    found = {}
    for name, make in CASES.items():
        rng = np.random.default_rng(0)
        sides = make()
        for side in sides:
            give_pages(side, TOKENS, rng)
        found[name] = {"num_tokens": TOKENS, "prefill": _side(sides[0]), "decode": _side(sides[1])}
    return found


def _side(side: Side) -> dict[str, Any]:
    ranks = []
    for rank, tensors in zip(side.layout.ranks, side.caches, strict=True):
        starts = {region.address: region.name for region in rank.regions}
        views = {layer: _view(tensor, starts) for layer, tensor in tensors.items()}
        ranks.append({"regions": {region.name: region.size_bytes for region in rank.regions}, "views": views})
    return {"ranks": ranks, "tables": side.tables, "layout": base64.b64encode(wire.encode(_moved(side))).decode()}


def _moved(side: Side) -> Any:
    """The layout at addresses that are the same in every recording."""
    from kvreshard.kinds.assemble import relocate

    addresses = {
        rank.rank: {region.name: (1 << 40) + (number << 30) for number, region in enumerate(rank.regions)}
        for rank in side.layout.ranks
    }
    return relocate(side.layout, addresses)


def _view(tensor: Any, starts: Mapping[int, str]) -> dict[str, Any]:
    return {
        "region": starts[tensor.untyped_storage().data_ptr()],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "offset": tensor.storage_offset(),
    }


def as_text(found: Mapping[str, Any]) -> str:
    """One line per case, so that a change shows which."""
    lines = [f"{json.dumps(name)}: {json.dumps(case, sort_keys=True)}" for name, case in found.items()]
    return "{\n" + ",\n".join(lines) + "\n}\n"


if __name__ == "__main__":
    FILE.write_text(as_text(record()), encoding="utf-8")
    sys.stdout.write(f"{FILE.name}: {FILE.stat().st_size:,} bytes\n")
