"""Engines that are refused at start, with the remedy."""

from __future__ import annotations

import ast
import contextlib
import importlib
import itertools
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

import vllm
from tests.vllm.simulation.base import base_config
from tests.vllm.simulation.draw import MODELS
from tests.vllm.simulation.engine import Shape
from tests.vllm.simulation.world import World
from vllm.config import KVTransferConfig, ModelConfig
from vllm.distributed.kv_transfer import kv_transfer_state
from vllm.v1.worker import gpu_worker

import kvreshard
from kvreshard.model import LayoutError
from kvreshard.vllm import start_check
from kvreshard.vllm.start_check import check_outer, check_outputs, check_start

pytestmark = pytest.mark.vllm
ROOT = Path(__file__).parents[2]


def config(**model: Any) -> Any:
    """As much of a VllmConfig as is looked at: by default an engine that may start."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            **{
                "enable_sleep_mode": False,
                "enable_cumem_allocator": False,
                "sleep_mode_backend": "cumem",
                "hf_config": SimpleNamespace(model_type="llama"),
                "enable_return_routed_experts": False,
                **model,
            }
        ),
        parallel_config=SimpleNamespace(prefill_context_parallel_size=1, decode_context_parallel_size=1),
        kv_transfer_config=KVTransferConfig(kv_connector="x", kv_role="kv_both"),
        aux_output_config=SimpleNamespace(enabled=False),
        cache_config=SimpleNamespace(mamba_cache_mode="none"),
        scheduler_config=SimpleNamespace(policy="fcfs"),
        compilation_config=SimpleNamespace(pass_config=SimpleNamespace(fuse_qk_norm_rope_kvcache=False)),
    )


@pytest.mark.parametrize(
    ("pcp", "dcp", "role", "refusal"),
    [
        (2, 1, "kv_consumer", "prefill context parallel size 2 with kv_role kv_consumer.*kv_producer"),
        (2, 1, "kv_both", "prefill context parallel size 2 with kv_role kv_both"),
        (2, 1, "kv_producer", None),
        (2, 2, "kv_consumer", None),
        (1, 1, "kv_consumer", None),
    ],
)
def test_replicas_that_could_not_be_loaded_are_refused(pcp: int, dcp: int, role: str, refusal: str | None) -> None:
    asked = config()
    asked.parallel_config = SimpleNamespace(prefill_context_parallel_size=pcp, decode_context_parallel_size=dcp)
    asked.kv_transfer_config = KVTransferConfig(kv_connector="x", kv_role=role)
    if refusal is None:
        check_start(asked)
        return
    with pytest.raises(LayoutError, match=refusal):
        check_start(asked)


def test_replicas_that_could_not_be_read_back_into_are_refused() -> None:
    asked = config()
    asked.parallel_config = SimpleNamespace(prefill_context_parallel_size=2, decode_context_parallel_size=1)
    for reads_back in (False, True):
        asked.kv_transfer_config = KVTransferConfig(
            kv_connector="x", kv_role="kv_producer", kv_connector_extra_config={"bidirectional_kv_xfer": reads_back}
        )
        if not reads_back:
            check_start(asked)
    with pytest.raises(LayoutError, match=r"size 2 with bidirectional_kv_xfer.*set it to false, or --decode-context"):
        check_start(asked)


def test_routed_experts_are_refused_as_vllm_does_for_its_own_connectors() -> None:
    asked = config()
    check_start(asked)
    if "enable_return_routed_experts" in ModelConfig.__dataclass_fields__:  # vLLM 0.30
        asked.model_config.enable_return_routed_experts = True
    else:
        aux_output = importlib.import_module("vllm.config.aux_output")
        asked.aux_output_config = aux_output.AuxOutputConfig(enable_return_routed_experts=True)
    for check in (check_start, check_outputs):
        with pytest.raises(LayoutError, match="--enable-return-routed-experts is on"):
            check(asked)


@pytest.mark.parametrize(
    ("model", "told"),
    [
        ({"enable_sleep_mode": True}, "without --enable-sleep-mode"),
        ({"enable_cumem_allocator": True}, "--enable-cumem-allocator is on.*expandable_segments"),
        ({"sleep_mode_backend": "checkpoint"}, "sleep_mode_backend is checkpoint"),
    ],
)
def test_an_engine_whose_caches_may_be_remapped_is_refused(
    model: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where vLLM does not tell the connector, or what is told is not known."""
    for version in ("0_30", "0_32", "0_33"):
        chosen = importlib.import_module(f"kvreshard.vllm.versions.v{version}").RELEASE
        monkeypatch.setattr(start_check, "release", lambda chosen=chosen: chosen)
        if chosen.can_sleep and "sleep_mode_backend" not in model:
            check_start(config(**model))
            continue
        with pytest.raises(LayoutError, match=told):
            check_start(config(**model))


@pytest.mark.parametrize(
    ("version", "part", "option", "value", "told"),
    [
        ("0_30", "cache_config", "mamba_cache_mode", "all", "mamba_cache_mode is all.*--mamba-cache-mode align"),
        (
            "0_30",
            "scheduler_config",
            "policy",
            "priority",
            "--scheduling-policy priority with a kv_role that loads.*fcfs",
        ),
        ("0_31", "cache_config", "mamba_cache_mode", "all", "mamba_cache_mode is all.*--mamba-cache-mode align"),
        ("0_33", "pass_config", "fuse_qk_norm_rope_kvcache", True, "interleaves V.*--compilation-config"),
    ],
)
def test_what_a_release_has_and_caches_do_not_show_is_refused(
    version: str, part: str, option: str, value: object, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = importlib.import_module(f"kvreshard.vllm.versions.v{version}").RELEASE
    monkeypatch.setattr(start_check, "release", lambda: chosen)
    asked = config()
    check_start(asked)
    setattr(asked.compilation_config.pass_config if part == "pass_config" else getattr(asked, part), option, value)
    with pytest.raises(LayoutError, match=told):
        check_start(asked)


@pytest.mark.parametrize("platform", ["cuda", "rocm", "xpu"])
def test_an_engine_that_may_start_has_its_caches_outside_of_what_sleeps(
    platform: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every way to set vLLM's options where vLLM does not tell the connector: either it is refused, or its worker takes no pool for the caches."""
    monkeypatch.setattr(
        start_check, "release", lambda: importlib.import_module("kvreshard.vllm.versions.v0_32").RELEASE
    )
    kind = SimpleNamespace(
        is_cuda_alike=lambda: platform != "xpu", is_xpu=lambda: platform == "xpu", is_cpu=lambda: False
    )
    monkeypatch.setattr(gpu_worker, "current_platform", kind)
    pool = SimpleNamespace(use_memory_pool=lambda tag: tag)
    monkeypatch.setattr(gpu_worker, "get_mem_allocator_instance", lambda: pool)
    started, pooled = [], []
    for sleeps, takes, backend in itertools.product((False, True), (False, True), ("cumem", "other")):
        asked = config(enable_sleep_mode=sleeps, enable_cumem_allocator=takes, sleep_mode_backend=backend)
        worker = SimpleNamespace(vllm_config=asked)
        context = gpu_worker.Worker._maybe_get_memory_pool_context(worker, "kv_cache")
        is_pooled = not isinstance(context, contextlib.nullcontext)
        pooled.append(is_pooled)
        with contextlib.suppress(LayoutError):
            check_start(asked)
            started.append(is_pooled)
    assert started == [False]
    assert any(pooled), "the pool that caches are to stay out of is still taken by somebody"


def sources() -> Iterator[tuple[str, str]]:
    """vLLM's own files, without connectors."""
    root = Path(vllm.__file__).parent
    for path in root.rglob("*.py"):
        place = path.relative_to(root).as_posix()
        if not place.startswith("distributed/kv_transfer/kv_connector/v1/"):
            yield place, path.read_text(encoding="utf-8")


def test_no_other_option_of_vllm_makes_an_engine_sleep() -> None:
    """A new one, or a new place that switches one on, is to be looked at."""
    names = {name for name in ModelConfig.__dataclass_fields__ if "sleep" in name or "cumem" in name}
    assert {"enable_sleep_mode", "sleep_mode_backend", "enable_cumem_allocator"} <= names
    assert names <= {
        "enable_sleep_mode",
        "sleep_mode_backend",
        "sleep_mode_offload_cudagraph",
        "sleep_preserve_parameter_names",
        "enable_cumem_allocator",
    }
    switch = re.compile(r"\.(enable_sleep_mode|enable_cumem_allocator|sleep_mode_backend) = ")
    # The second sets the second because of the first. The snapshot server sets it on arguments that become a ModelConfig.
    found = {place for place, text in sources() if switch.search(text)}
    assert found - {"snapshot/server.py"} == {"config/model.py"}


def functions_that_look_at_names(place: str, text: str) -> Iterator[tuple[str, str]]:
    """(file, function) where a connector's name is compared or asked for."""

    def look(node: ast.AST, function: str) -> Iterator[tuple[str, str]]:
        for child in ast.iter_child_nodes(node):
            name = child.name if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) else function
            if is_about_a_name(child):
                yield place, name
            yield from look(child, name)

    yield from look(ast.parse(text), "")


def is_about_a_name(node: ast.AST) -> bool:
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Attribute) and node.func.attr == "has_connector"
    if not isinstance(node, ast.Compare) or all(ast.unparse(one) == "None" for one in node.comparators):
        return False
    texts = [ast.unparse(one) for one in (node.left, *node.comparators)]
    return any(text.endswith(".kv_connector") or ".get('kv_connector')" in text for text in texts)


def test_every_place_where_vllm_looks_at_a_connectors_name_is_in_the_table() -> None:
    may_look = re.compile(r"has_connector\(|\.kv_connector\b|get\(.kv_connector.\)")
    found = {
        where
        for place, text in sources()
        if may_look.search(text)
        for where in functions_that_look_at_names(place, text)
    }
    page = (ROOT / "docs" / "reference" / "connector-names.md").read_text(encoding="utf-8")
    row = re.compile(r"^\| `([a-z0-9_/]+\.py)`, `(\w+)` \|", re.MULTILINE)
    table, only_newer = (set(row.findall(part)) for part in page.split("Only in 0.33:"))
    assert found <= table | only_newer
    assert len(table) == 8
    assert len(only_newer) == 3
    if vllm.__version__.startswith("0.32."):
        assert found == table


@pytest.mark.parametrize(
    ("outer", "role", "is_refused"),
    [
        ("kv_producer", "kv_consumer", True),
        ("kv_producer", "kv_both", True),
        ("kv_producer", "kv_producer", False),
        ("kv_consumer", "kv_both", False),
        ("kv_both", "kv_consumer", False),
        (None, "kv_consumer", False),
    ],
)
def test_a_child_loads_only_where_the_outer_role_does(
    outer: str | None, role: str, is_refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    around = None
    if outer is not None:
        around = SimpleNamespace(_kv_transfer_config=KVTransferConfig(kv_connector="MultiConnector", kv_role=outer))
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", around)
    child = SimpleNamespace(kv_transfer_config=KVTransferConfig(kv_connector="ReshardConnector", kv_role=role))
    if not is_refused:
        assert not check_outer(child, has_windows=True)
        return
    with pytest.raises(LayoutError, match=f"kv_role {role}, and MultiConnector around it kv_producer.*set the outer"):
        check_outer(child, has_windows=False)


@pytest.mark.parametrize("model_type", ["step5", "step5_vl"])
def test_a_model_that_vllm_would_take_us_to_transfer_is_refused(model_type: str) -> None:
    asked = config(hf_config=SimpleNamespace(model_type=model_type))
    with pytest.raises(LayoutError, match=f"is a {model_type}, .*leave out kv_connector_module_path"):
        check_start(asked)


OURS = {"kv_connector": "ReshardConnector", "kv_role": "kv_both"}
DROP_IN = {"kv_connector": "NixlConnector", "kv_connector_module_path": "kvreshard.vllm", "kv_role": "kv_both"}
IN_TREE = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
CACHE = {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}


@pytest.mark.parametrize(
    ("children", "refusal"),
    [
        ([OURS, CACHE], None),
        ([CACHE, DROP_IN, CACHE], None),
        ([OURS, OURS], "2 connectors.*: ReshardConnector and ReshardConnector; .*leave one"),
        ([IN_TREE, DROP_IN], "NixlConnector and NixlConnector of kvreshard.vllm"),
        ([DROP_IN, CACHE, {"kv_connector": "ShadowConnector"}, IN_TREE], "3 connectors"),
        ([OURS, {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [IN_TREE]}}], "2 conn"),
    ],
)
def test_there_is_one_connector_over_nixl(
    children: list[dict[str, Any]], refusal: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    outer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", SimpleNamespace(_kv_transfer_config=outer))
    child = config(is_multimodal_model=False)
    if refusal is None:
        assert check_outer(child, has_windows=False)
        return
    with pytest.raises(LayoutError, match=f"MultiConnector has .*{refusal}"):
        check_outer(child, has_windows=False)


@pytest.mark.parametrize(
    ("children", "before"),
    [
        ([OURS, CACHE], None),
        ([CACHE, OURS], "ExampleConnector before"),
        ([{"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [DROP_IN, CACHE]}}], None),
        ([CACHE, {"kv_connector": "OffloadingConnector"}, DROP_IN], "ExampleConnector and OffloadingConnector before"),
    ],
)
@pytest.mark.parametrize("role", ["kv_producer", "kv_both"])
@pytest.mark.parametrize("has_windows", [False, True])
def test_where_pictures_may_be_missing_or_blocks_incomplete_this_connector_is_asked_first(
    has_windows: bool, role: str, children: list[dict[str, Any]], before: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache before it would load what stands before a picture, and vLLM would compute the picture's tokens without it."""
    outer = KVTransferConfig(
        kv_connector="MultiConnector", kv_role="kv_both", kv_connector_extra_config={"connectors": children}
    )
    monkeypatch.setattr(kv_transfer_state, "_KV_CONNECTOR_AGENT", SimpleNamespace(_kv_transfer_config=outer))
    child = config(is_multimodal_model=not has_windows)
    child.kv_transfer_config.kv_role = role
    if before is None or role == "kv_producer":
        assert check_outer(child, has_windows=has_windows)
        return
    with pytest.raises(
        LayoutError, match=f"MultiConnector asks {before} x: .*list x first, or give it kv_role kv_producer"
    ):
        check_outer(child, has_windows=has_windows)


def test_the_first_line_says_version_backend_and_options(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    caplog.set_level(logging.INFO, "kvreshard")
    shapes = {
        name: Shape(MODELS[0].layers(16, 0), role=role, lease_s=7.0)
        for name, role in (("p", "kv_producer"), ("d", "kv_consumer"))
    }
    World(shapes, base_config(), 0).close()
    first, second = (record for record in caplog.records if getattr(record, "event", "") == "started")
    address = f"{first.address}"  # type: ignore[attr-defined]
    assert re.fullmatch(
        rf"kvreshard {re.escape(kvreshard.__version__)} with vLLM \S+ and NIXL \S+ \(UCX_TLS=tcp,self\): engine p, kv_connector ReshardConnector, "
        rf"kv_role kv_producer; 1 rank, \d+ fields in \d+ groups?, \d+ MiB of cache; hands out its layout at {re.escape(address)} without keys; "
        r"options: kv_lease_duration=7\.0, lease_slots=512",
        first.getMessage(),
    ), first.getMessage()
    assert ":" in address
    assert "engine d, kv_connector ReshardConnector, kv_role kv_consumer; " in second.getMessage()
    assert "; hands out nothing: it only loads; " in second.getMessage()
