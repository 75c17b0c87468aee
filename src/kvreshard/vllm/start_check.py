"""Engines that are refused at start, whatever their caches are.

| engine | why |
|---|---|
| before vLLM 0.33: sleep mode, or the allocator that it uses | it frees the memory of caches and maps other memory at the same addresses (vLLM 0.32.0, `device_allocator/cumem.py`). NIXL's registrations do not follow: a peer may read the old memory |
| `--enable-return-routed-experts` | the experts that a prefill chose are not in its cache: the decode engine would return none for the prompt. vLLM refuses it for its own connectors by name (`config/vllm.py`, `_verify_aux_output_compatibility`) |
| prefill context parallelism without decode context parallelism, and a role that loads, or `bidirectional_kv_xfer` | the ranks are replicas, and vLLM hands out the metadata of one of them only (`gpu_worker.py`, `get_kv_connector_handshake_metadata`): the others would never be loaded |
| a role that loads, as a child of a connector whose role does not | by the outer role vLLM decides whether blocks of a request that has ended wait for the steps that may still write them (`Scheduler.__init__`): a loaded cache may be overwritten |
| a Step5 model | it keeps sparse summaries and a ring of rows beside its cache, which nobody has compared with what is described here. vLLM 0.33 refuses connectors of other names than NixlConnector and MooncakeStoreConnector (`models/step5/nvidia/model.py`), and takes this one for NixlConnector where it is named so |
| what a release of vLLM has and its caches do not show: `versions` | named there |
| another connector over NIXL beside it in a MultiConnector: vLLM's own NixlConnector, or this one twice | vLLM tells every child of every request, also those that do not load it: the other would release the prefill, or read it by another protocol, while this one reads it; and two children that return `kv_transfer_params` end the engine (`multi_connector.py`, `request_finished`) |
| a connector before this one in a MultiConnector, and a role that loads, of a model with pictures, audio or video | the first that has tokens of a request loads them. Where the decode engine lacks a picture, all up to its end must come from the prefill: the other would load the tokens before it, and vLLM would compute the rest without the picture |
| the same of a model with windows or chunks | a load may leave a window's first block incomplete. Other connectors store blocks by hashes that this one changes for such a request, if they have not been asked yet (`LoadableTokens`) |

A role under another one, and connectors beside this one, are checked when the caches are registered: vLLM keeps the outer connector where a worker can
find it, and a child sees only its own configuration. Every refusal is a LayoutError with the remedy.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from kvreshard.model import LayoutError
from kvreshard.vllm.versions import find_version, release

# vLLM's own, and this package's.
OVER_NIXL = ("NixlConnector", "NixlPullConnector", "NixlPushConnector", "ReshardConnector", "ShadowConnector")


def check_start(vllm_config: Any) -> None:
    """Raises LayoutError."""
    _check_sleep(vllm_config.model_config)
    check_outputs(vllm_config)
    _check_model(vllm_config.model_config)
    _check_replicas(vllm_config)
    _check_release(vllm_config)


def check_outputs(vllm_config: Any) -> None:
    """Check what an engine returns beside tokens. Raises LayoutError."""
    if release().returns_routed_experts(vllm_config):
        raise LayoutError(
            "--enable-return-routed-experts is on: the experts that a prefill chose are not in its cache, so the decode engine could "
            "not return them for the prompt; start it without, or without a prefill engine"
        )


def check_outer(vllm_config: Any, *, has_windows: bool) -> bool:
    """Check a connector around this one. Returns whether it has others inside. `vllm_config` has this connector's `KVTransferConfig`.

    Raises LayoutError.
    """
    from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

    config = vllm_config.kv_transfer_config
    outer = get_kv_transfer_group()._kv_transfer_config if has_kv_transfer_group() else config
    if config.is_kv_consumer and not outer.is_kv_consumer:
        raise LayoutError(
            f"{config.kv_connector} has kv_role {config.kv_role}, and {outer.kv_connector} around it {outer.kv_role}: vLLM would not keep "
            "steps that are under way from writing what is loaded; set the outer kv_role to kv_both"
        )
    children = list(_children(outer.kv_connector_extra_config))
    over_nixl = [child for child in children if child.get("kv_connector") in OVER_NIXL]
    if len(over_nixl) > 1:
        named = " and ".join(map(_describe, over_nixl))
        raise LayoutError(
            f"{outer.kv_connector} has {len(over_nixl)} connectors that move requests over NIXL: {named}; each would answer for the other's "
            "requests: leave one of them"
        )
    before = list(itertools.takewhile(lambda child: child not in over_nixl, children)) if over_nixl else []
    if before and config.is_kv_consumer and (has_windows or vllm_config.model_config.is_multimodal_model):
        raise LayoutError(
            f"{outer.kv_connector} asks {' and '.join(map(_describe, before))} before {config.kv_connector}: it may store blocks of a window that a "
            "load leaves incomplete, or load what stands before a picture that is not here, and vLLM would compute the rest without the picture; "
            f"list {config.kv_connector} first, or give it kv_role kv_producer if this engine only prefills"
        )
    return len(children) > 1


def _describe(child: Mapping[str, Any]) -> str:
    path = child.get("kv_connector_module_path")
    return f"{child['kv_connector']} of {path}" if path else str(child["kv_connector"])


def _children(extra: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The configurations of all connectors inside a MultiConnector, in the order in which vLLM asks them."""
    for child in extra.get("connectors", ()):
        inner = child.get("kv_connector_extra_config") or {}
        if "connectors" in inner:
            yield from _children(inner)
        else:
            yield child


def _check_sleep(model_config: Any) -> None:
    """Any engine can be put to sleep, however it was started (vLLM 0.32.0, `v1/engine/core.py`, `sleep`): where its caches lie decides.

    vLLM 0.33 tells the connector (`unregister_kv_caches`, `restore_kv_caches`).
    """
    if model_config.enable_sleep_mode and not release().can_sleep:
        raise LayoutError(
            f"sleep mode is on: with vLLM {find_version()} an engine that wakes up has its caches in other memory than peers read from; start it "
            "without --enable-sleep-mode, or take vLLM 0.33"
        )
    if model_config.enable_cumem_allocator and not release().can_sleep:
        raise LayoutError(
            f"--enable-cumem-allocator is on: vLLM {find_version()} can put such an engine to sleep, and its caches are then in other memory than "
            "peers read from; start it without, and without expandable_segments:True in PYTORCH_CUDA_ALLOC_CONF, or take vLLM 0.33"
        )
    if model_config.sleep_mode_backend != "cumem":
        raise LayoutError(
            f"sleep_mode_backend is {model_config.sleep_mode_backend}: it can put an engine to sleep that was not started with sleep mode, and "
            "what happens to its caches is not known; leave it out"
        )


def _check_model(model_config: Any) -> None:
    model_type = str(getattr(model_config.hf_config, "model_type", ""))
    if model_type.startswith("step5"):
        raise LayoutError(
            f"the model is a {model_type}, whose sparse summaries ReshardConnector does not transfer: leave out "
            "kv_connector_module_path, so that vLLM's own NixlConnector does"
        )


def _check_replicas(vllm_config: Any) -> None:
    parallel, config = vllm_config.parallel_config, vllm_config.kv_transfer_config
    pcp_size, dcp_size = int(parallel.prefill_context_parallel_size), int(parallel.decode_context_parallel_size)
    if pcp_size == 1 or dcp_size > 1:
        return
    replicas = f"the {pcp_size} ranks are replicas, and only one of them could be loaded"
    remedy = f"or --decode-context-parallel-size to {pcp_size}"
    if config.is_kv_consumer:
        raise LayoutError(
            f"prefill context parallel size {pcp_size} with kv_role {config.kv_role}: {replicas}; set kv_role to kv_producer, {remedy}"
        )
    if config.kv_connector_extra_config.get("bidirectional_kv_xfer"):
        raise LayoutError(
            f"prefill context parallel size {pcp_size} with bidirectional_kv_xfer: {replicas}; set it to false, {remedy}"
        )


def _check_release(vllm_config: Any) -> None:
    obstacle = release().find_obstacle(vllm_config)
    if obstacle is not None:
        raise LayoutError(f"vLLM {find_version()}: {obstacle}")
