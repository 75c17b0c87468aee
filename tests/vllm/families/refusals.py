"""Patches for what keeps a model's class from being made where no model runs: what only other platforms have.

| taken out | because |
|---|---|
| states in float32 for want of AVX-512 | it is the CPU build's choice, not the model's |
| no prefix cache for latents without AMX | the same |
| sparse attention is refused, FlashAttention asked for | layers are made, nothing attends |
| a hybrid's pages are made for the kernels of a CPU | the catalog's are made for FlashAttention's |
| pages of GPU backends are opaque on a CPU | their inside is known where they run |
| what the older model runner has not | nothing runs, and the newer one wants Triton |
| what a GPU can | constructors ask for recipes of kernels: SM100's |
| CUDA streams, an accelerator's memory, Triton's allocator | made by constructors, used by nobody here |
| modules of pictures and kernels that are not installed | imported by model files, used by nobody here |
| slopes of ALiBi and their roots, how far a chunk looks back | they are values, of which the CPU's kernel knows not all |
| scales of fp8 caches | they are values, which nothing here has |
| ranks meet one another | a rank's layers do not depend on what the others say |
| configuration classes that come with the weights | in their place stands one that keeps what the file says |
| each class is inspected in a process of its own | 10 s of imports per model |
"""

from __future__ import annotations

import importlib
import os
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any
from unittest.mock import MagicMock

import torch
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import CONFIG_MAPPING, PreTrainedConfig
from vllm.config import VllmConfig
from vllm.distributed.device_communicators.cpu_communicator import CpuCommunicator
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.model_executor.models import registry
from vllm.platforms.cpu import CpuPlatform
from vllm.platforms.interface import DeviceCapability
from vllm.transformers_utils.config import _CONFIG_REGISTRY
from vllm.triton_utils import triton
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend, CPUAttentionBackendImpl
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

from kvreshard.vllm.describe import layer_info

ABSENT = ("cuda", "cutlass", "torchvision")
CPU_BACKENDS = ("AMX_MLA", "CPU_ATTN", "CPU_MLA")
SPARSE = "vllm.v1.attention.backends.mla.flashmla_sparse.FlashMLASparseBackend"


class AsInTheFile(PreTrainedConfig):
    """The configuration class of families whose own comes with the weights: the fields of the file, and no defaults."""

    def __init__(self, **fields: Any) -> None:
        parts = {name: _part(value) for name, value in fields.items() if name.endswith("_config")}
        super().__init__(**{**fields, **parts})


def _part(value: Any) -> Any:
    """The configuration of a part of a multimodal model."""
    if not isinstance(value, dict) or "model_type" not in value:
        return value
    known = learn(value)
    return known(**{name: field for name, field in value.items() if name != "model_type"})


def learn(config: dict[str, Any]) -> type[PreTrainedConfig]:
    """The configuration class of a file, which vLLM will take too."""
    model_type = config["model_type"]
    known = _CONFIG_REGISTRY if model_type in _CONFIG_REGISTRY else CONFIG_MAPPING
    if model_type not in known:
        _CONFIG_REGISTRY[model_type] = type(model_type, (AsInTheFile,), {"model_type": model_type})
        known = _CONFIG_REGISTRY
    return known[model_type]


class _Absent(MetaPathFinder, Loader):
    """Modules of which nothing is used."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] in ABSENT else None

    def create_module(self, spec: ModuleSpec) -> Any:
        return MagicMock(__path__=[], __spec__=spec, __version__="0.0")

    def exec_module(self, module: Any) -> None:
        """Nothing to do."""


UNKNOWN_TO_CPU = ("chunk_lookback", "use_alibi_sqrt")


def take_out() -> None:
    """For the whole process."""
    sys.meta_path.append(_Absent())
    torch.cpu._is_avx512_bf16_supported = lambda: False
    torch.cpu._is_amx_tile_supported = lambda: True
    torch.accelerator.current_device_index = lambda: 0
    torch.accelerator.empty_cache = lambda: None
    torch.cuda.Stream = torch.cuda.Event = MagicMock
    triton.set_allocator = lambda *_: None
    CpuPlatform.get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(10, 0))
    choose = CpuPlatform.get_attn_backend_cls.__func__

    def chosen(cls: Any, selected: Any, attn_selector_config: Any, *args: Any, **kwargs: Any) -> Any:
        if attn_selector_config.use_sparse:
            return SPARSE
        return choose(cls, selected, attn_selector_config, *args, **kwargs)

    CpuPlatform.get_attn_backend_cls = classmethod(chosen)
    CpuPlatform._find_non_ssm_backends = classmethod(lambda cls, config: [FlashAttentionBackend])
    find = layer_info._platform

    def platform(config: Any, backend: str, layer: Any, spec: Any) -> str:
        return find(config, backend, layer, spec) if backend in CPU_BACKENDS else "cuda"

    layer_info._platform = platform
    VllmConfig._get_v1_model_runner_unsupported_features = lambda self: []
    layer_info._scales = lambda name, layer: None
    listed = torch.Tensor.tolist
    torch.Tensor.tolist = lambda tensor: [0.0] * tensor.numel() if tensor.is_meta else listed(tensor)
    CPUAttentionBackend.supports_alibi_sqrt = classmethod(lambda cls: True)
    make = CPUAttentionBackendImpl.__init__

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **{name: value for name, value in kwargs.items() if name not in UNKNOWN_TO_CPU})

    CPUAttentionBackendImpl.__init__ = made
    # They want what has just been taken out, and one another: the model first.
    qwen4 = importlib.import_module("vllm.models.qwen4_exp.nvidia.model")
    sys.modules[qwen4.Qwen4ExpQSAAttention.__module__].is_flash_attn_varlen_func_available = lambda: True
    registry._LazyRegisteredModel.inspect_model_cls = lambda self: registry._ModelInfo.from_model_cls(
        self.load_model_cls()
    )


def join_nobody(tp_size: int, tp_rank: int) -> None:
    """A process group of `tp_size` ranks of which this is one, and nobody the others."""
    os.environ["VLLM_DIST_IDENT"] = "nobody"
    torch.distributed.init_process_group("fake", rank=tp_rank, world_size=tp_size, store=FakeStore())
    new_group = torch.distributed.new_group
    torch.distributed.new_group = lambda ranks=None, *_, **__: new_group(ranks, backend="fake")
    MessageQueue.create_from_process_group = staticmethod(lambda *_, **__: None)
    CpuCommunicator._all_group_ranks_share_shm_group_name = lambda self: False
