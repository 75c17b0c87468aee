"""What the kit ran on: versions, driver, device, limits. Nothing fails here: what cannot be asked is left out."""

from __future__ import annotations

import contextlib
import os
import platform
import resource
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "numpy", "cupy-cuda13x", "triton", "msgspec", "pyzmq", "nixl", "nixl-cu13", "nixl-cu12", "pytest")
VARIABLES = ("UCX_TLS", "UCX_NET_DEVICES", "LD_LIBRARY_PATH", "CUDA_VISIBLE_DEVICES", "UCX_CUDA_IPC_ENABLE_GET_ZCOPY")
GPU_FIELDS = "name,driver_version,memory.total,mig.mode.current,pcie.link.gen.max,compute_mode"


def describe_machine(device: str) -> dict[str, Any]:
    """Everything that a reader of the results may ask for."""
    found: dict[str, Any] = {
        "kvreshard": version("kvreshard") if _has("kvreshard") else "a checkout",
        "python": platform.python_version(),
        "kernel": platform.release(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "memory_lock_bytes": resource.getrlimit(resource.RLIMIT_MEMLOCK)[0],
        "packages": {name: version(name) for name in PACKAGES if _has(name)},
        "variables": {name: os.environ[name] for name in VARIABLES if name in os.environ},
        "infiniband": sorted(path.name for path in Path("/dev/infiniband").glob("*")),
    }
    if device == "cpu":
        return found
    with contextlib.suppress(OSError, subprocess.SubprocessError, ValueError):
        asked = ["nvidia-smi", f"--query-gpu={GPU_FIELDS}", "--format=csv,noheader"]
        words = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=True).stdout.strip().split(", ")
        found["gpu"] = dict(zip(GPU_FIELDS.split(","), words, strict=False))
        links = subprocess.run(["nvidia-smi", "nvlink", "-s"], capture_output=True, text=True, timeout=20, check=False)
        found["nvlinks"] = links.stdout.count("GB/s")
    with contextlib.suppress(Exception):  # torch says what is wrong in many ways
        import torch

        found["cuda"] = torch.version.cuda
        found["multiprocessors"] = torch.cuda.get_device_properties(device).multi_processor_count
    return found


def _has(package: str) -> bool:
    try:
        version(package)
    except PackageNotFoundError:
        return False
    return True
