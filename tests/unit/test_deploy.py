"""Are the manifests what Kubernetes takes, and do ports, variables, options and addresses in them exist?

They are built with `kubectl kustomize`; where that is not installed, what it made last time is looked at (`tests/golden/deploy`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from tests import promtool
from typer.testing import CliRunner

from kvreshard.cli.app import app
from kvreshard.vllm.options import read_options

ROOT = Path(__file__).parents[2]
DEPLOY, GOLDEN = ROOT / "deploy", ROOT / "tests" / "golden" / "deploy"
BUILT = {"base": "base", "router": "overlays/router", "llm-d-gpt-oss": "overlays/llm-d-gpt-oss"}
KUBERNETES = "1.37"


def documents(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((GOLDEN / f"{name}.yaml").read_text()) if document]


def by_kind(name: str, kind: str) -> dict[str, dict[str, Any]]:
    return {one["metadata"]["name"]: one for one in documents(name) if one["kind"] == kind}


@pytest.mark.parametrize("name", BUILT)
def test_what_was_built_is_what_the_sources_say(name: str) -> None:
    if shutil.which("kubectl") is None:
        pytest.skip("kubectl is not installed: what it built last time is checked all the same")
    command = ["kubectl", "kustomize", str(DEPLOY / "kustomize" / BUILT[name])]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert found.stdout == (GOLDEN / f"{name}.yaml").read_text(), (
        " ".join(command[:2]) + f" > tests/golden/deploy/{name}.yaml"
    )


@pytest.mark.parametrize("name", BUILT)
def test_kubernetes_takes_every_document(name: str) -> None:
    found = documents(name)
    assert {one["kind"] for one in found} >= {"Deployment", "Service", "ConfigMap", "NetworkPolicy"}
    for one in found:
        kubernetes_validate.validate(one, KUBERNETES, strict=True)


def test_the_schemas_refuse_what_is_wrong() -> None:
    wrong = by_kind("base", "Deployment")["prefill"]
    wrong["spec"]["template"]["spec"]["containers"][0]["prots"] = []
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@pytest.mark.parametrize("name", BUILT)
def test_engines_are_what_the_connector_and_vllm_take(name: str) -> None:
    maps, deployments = by_kind(name, "ConfigMap"), by_kind(name, "Deployment")
    for role, kv_role in (("prefill", "kv_producer"), ("decode", "kv_consumer")):
        pod = deployments[role]["spec"]["template"]["spec"]
        (engine,) = pod["containers"]
        variables = {one["name"]: one for one in engine["env"]}
        assert variables["VLLM_NIXL_SIDE_CHANNEL_HOST"]["valueFrom"]["fieldRef"]["fieldPath"] == "status.podIP"
        ports = {port["name"]: port["containerPort"] for port in engine["ports"]}
        assert str(ports["handshake"]) == variables["VLLM_NIXL_SIDE_CHANNEL_PORT"]["value"]
        assert f"--port={ports['http']}" in engine["args"]
        (tp,) = [arg.partition("=")[2] for arg in engine["args"] if arg.startswith("--tensor-parallel-size=")]
        assert engine["resources"]["limits"]["nvidia.com/gpu"] == tp
        for variable in ("MODEL", "KV_TRANSFER"):
            key = variables[variable]["valueFrom"]["configMapKeyRef"]
            assert maps[key["name"]]["data"][key["key"]]
        key = variables["KV_TRANSFER"]["valueFrom"]["configMapKeyRef"]
        config = json.loads(maps[key["name"]]["data"][key["key"]])
        assert (config["kv_connector"], config["kv_role"]) == ("ReshardConnector", kv_role)
        check_options(config.get("kv_connector_extra_config", {}), pod)
        (waits,) = [int(arg.partition("=")[2]) for arg in engine["args"] if arg.startswith("--shutdown-timeout=")]
        paused = int(engine["lifecycle"]["preStop"]["exec"]["command"][1])
        assert pod["terminationGracePeriodSeconds"] > waits + paused


def check_options(extra: dict[str, Any], pod: dict[str, Any]) -> None:
    """Each is known, and files lie where the Secret is mounted."""
    file = read_options(extra).curve_secret_key_file
    if file is not None:
        folder = Path(file).parent.as_posix()
        assert folder in {mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}


@pytest.mark.parametrize("name", BUILT)
def test_services_reach_ports_that_pods_have(name: str) -> None:
    deployments = by_kind(name, "Deployment").values()
    for service in by_kind(name, "Service").values():
        wanted = service["spec"]["selector"].items()
        pods = [
            one["spec"]["template"]
            for one in deployments
            if wanted <= one["spec"]["template"]["metadata"]["labels"].items()
        ]
        assert len(pods) == 1
        names = {
            port["name"]
            for container in (*pods[0]["spec"]["containers"], *pods[0]["spec"].get("initContainers", ()))
            for port in container.get("ports", ())
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


def test_llm_ds_pair_is_the_one_of_its_guide() -> None:
    deployments = by_kind("llm-d-gpt-oss", "Deployment")
    found = {
        role: (one["spec"]["replicas"], one["spec"]["template"]["metadata"]["labels"]["llm-d.ai/role"])
        for role, one in deployments.items()
    }
    assert found == {"prefill": (8, "prefill"), "decode": (2, "decode")}
    assert "--tensor-parallel-size=4" in deployments["decode"]["spec"]["template"]["spec"]["containers"][0]["args"]
    sidecars = deployments["decode"]["spec"]["template"]["spec"]["initContainers"]
    assert [one["name"] for one in sidecars] == ["doctor", "routing-sidecar"]
    assert "--model-server-port=8200" in sidecars[1]["args"]


def test_dynamos_workers_go_by_the_name_that_it_knows() -> None:
    graph = yaml.safe_load((DEPLOY / "dynamo" / "graph.yaml").read_text())
    for name in ("VllmDecodeWorker", "VllmPrefillWorker"):
        worker = graph["spec"]["services"][name]
        args = worker["extraPodSpec"]["mainContainer"]["args"]
        (config,) = [json.loads(arg.partition("=")[2]) for arg in args if arg.startswith("--kv-transfer-config=")]
        assert (config["kv_connector"], config["kv_connector_module_path"]) == ("NixlConnector", "kvreshard.vllm")
        assert f"--tensor-parallel-size={worker['resources']['limits']['gpu']}" in args


def test_the_image_has_the_versions_of_the_package() -> None:
    text = (DEPLOY / "docker" / "Dockerfile").read_text()
    pins = (ROOT / "requirements-nixl.txt").read_text()
    (version,) = re.findall(r"^ARG NIXL_VERSION=(.+)$", text, re.MULTILINE)
    assert f"nixl=={version}\n" in pins
    ignored = (DEPLOY / "docker" / "Dockerfile.dockerignore").read_text().splitlines()
    for source in re.findall(r"^COPY (\S+)", text, re.MULTILINE):
        assert f"!{source}" in ignored


PAGE = (ROOT / "docs/reference/metrics.md").read_text()
SUFFIX = re.compile(r"_(bucket|count|sum)$")


def known_series() -> dict[str, set[str]]:
    """Series of the page of metrics, with their own labels."""
    return {
        name: set(labels.split(",")) - {""}
        for line in PAGE.splitlines()
        if line.startswith("| `kvreshard")
        for name, labels in re.findall(r"`(kvreshard_\w+)(?:\{([\w,]+)\})?`", line)
    }


def test_alerts_and_panels_ask_for_series_and_labels_that_there_are() -> None:
    known, of_vllm = known_series(), {"instance", "le", "engine"}
    rules = [rule for group in yaml.safe_load(promtool.RULES.read_text())["groups"] for rule in group["rules"]]
    expressions = [*(rule["expr"] for rule in rules), *promtool.dashboard_expressions()]
    assert len(expressions) > 30
    for expression in expressions:
        named = [SUFFIX.sub("", name) for name in re.findall(r"(?<![:\w])kvreshard_\w+", expression)]
        assert set(named) <= set(known), expression
        labels = {*re.findall(r"(\w+)[!=]~?\"", expression)}
        for grouped in re.findall(r"(?:by|on) \(([\w, ]+)\)", expression):
            labels |= set(grouped.split(", "))
        assert labels <= of_vllm.union(*(known[name] for name in named)), expression
    panels = json.loads(promtool.DASHBOARD.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    asked = " ".join(expressions)
    assert not [name for name in known if name not in asked and name not in SHOWN_ELSEWHERE]


# How many pieces, and what answers and refusals there are, is for tuning.
SHOWN_ELSEWHERE = {
    "kvreshard_load_bytes", "kvreshard_load_descriptors", "kvreshard_partial_loads_total", "kvreshard_answers_total",
    "kvreshard_refusals_total", "kvreshard_quarantined_total", "kvreshard_quarantined_blocks_total",
}  # fmt: skip


def test_every_alert_has_a_test_in_which_it_fires_and_one_in_which_it_does_not() -> None:
    alerts = {
        rule["alert"]
        for group in yaml.safe_load(promtool.RULES.read_text())["groups"]
        for rule in group["rules"]
        if "alert" in rule
    }
    cases = [
        case
        for test in yaml.safe_load(promtool.RULES.with_suffix(".test.yaml").read_text())["tests"]
        for case in test["alert_rule_test"]
    ]
    for fires in (True, False):
        assert {case["alertname"] for case in cases if bool(case["exp_alerts"]) is fires} == alerts


@pytest.mark.parametrize("page", ["README.md", "kustomize/components/keys/kustomization.yaml"])
def test_the_keys_that_a_secret_is_made_of_are_those_that_the_command_writes(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And those that the manifests mount."""
    text = (DEPLOY / page).read_text()
    (words,) = re.findall(r"kvreshard (keys .+)", text)
    monkeypatch.chdir(tmp_path)
    assert CliRunner().invoke(app, words.split()).exit_code == 0
    files = re.findall(r"--from-file=(\S+)", text)
    assert len(files) == 2
    assert all((tmp_path / file).is_file() for file in files)
    mounted = set(re.findall(r"/etc/kvreshard/([\w.]+)", (GOLDEN / "router.yaml").read_text()))
    assert mounted
    assert mounted <= set(files)
