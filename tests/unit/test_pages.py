"""Do options, series, alerts, causes, commands and bounds exist that the operator's pages name?"""

from __future__ import annotations

import importlib
import re
import shlex
from functools import cache
from pathlib import Path

import msgspec
import pytest
from typer.main import get_command

from kvreshard.cli.app import app
from kvreshard.model.tables import Request
from kvreshard.session import observer
from kvreshard.session.handshake_server import HOLD_S, MAX_HELD
from kvreshard.tools.flight import Flight, FlightSide
from kvreshard.vllm.options import OF_NIXL_CONNECTOR, Options
from kvreshard.vllm.outcomes import REASONS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
LIMITS = DOCS / "reference" / "limits.md"
PAGES = [
    *(DOCS / "howto" / f"{name}.md" for name in (
        "quick-start", "migrate-from-nixl-connector", "upgrade", "network", "capacity", "tuning", "troubleshooting",
        "early-reads",
    )),
    LIMITS,
]  # fmt: skip
# In backticks, lower case with underscores, and no option: fields of vLLM's configuration and of `kv_transfer_params`, labels, names of the system.
OTHERS = {
    "kv_role", "kv_both", "kv_producer", "kv_consumer", "kv_load_failure_policy", "kv_transfer_params", "kv_buffer_device", "kv_connector",
    "kv_connector_extra_config", "kv_connector_module_path", "engine_id", "sleep_mode_backend", "remote_host", "remote_port", "vllm_version",
    "max_tokens", "engine_config", "transfer_id", "do_remote_prefill", "do_remote_decode", "expandable_segments", "cuda_ipc", "nvidia_peermem",
}  # fmt: skip
BOUNDS = {
    "ranks of an instance": "model.wire.MAX_RANKS",
    "tensors of a cache": "model.wire.MAX_FIELDS",
    "cache groups": "model.wire.MAX_GROUPS",
    "a layout": "model.wire.MAX_MESSAGE_BYTES",
    "an instance's answer to a handshake": "session.engine_metadata.MAX_ENGINE_METADATA_BYTES",
    "NIXL's metadata of one rank": "session.engine_metadata.MAX_RANK_METADATA_BYTES",
    "registered regions of one rank": "transport.regions.MAX_REGIONS",
    "a question at the handshake port": "session.handshake_messages.MAX_MESSAGE_BYTES",
    "questions that a rank asks at once": "session.handshake_client.MAX_AT_ONCE",
    "instances of one host that are asked at once": "session.peers.MAX_PER_HOST",
    "public keys that are trusted": "session.keys.MAX_PEER_KEYS",
    "prefills in one question for them": "session.handshake_messages.MAX_TRANSFERS",
    "questions for prefills that a listener holds": "session.handshake_server.MAX_HELD",
    "the answer to such a question": "session.statement.MAX_STATEMENT_BYTES",
    "ended prefills whose `transfer_id` is remembered": "session.rendezvous.MAX_ENDED",
    "tokens of a prompt that is read early": "session.progress.MAX_TOKENS",
    "`kv_transfer_params`": "vllm.params.MAX_BYTES",
    "blocks in them, all groups": "vllm.params.MAX_PAGES",
    "pictures, audio and videos of a prompt": "vllm.prompt.MAX_ITEMS",
    "characters of a name": "model.text.MAX_NAME",
    "decode instances that report one prefill": "session.lease.MAX_CONSUMERS_PER_LEASE",
    "`kv_lease_duration`": "vllm.options.MAX_LEASE_S",
    "a NIXL notification": "transport.base.MAX_NOTIFICATION_BYTES",
    "different pieces of a page, over all kinds of layers of a layout": "model.layout_check.MAX_RUNS_PER_LAYOUT",
    "different pieces of the pages of one request": "plan.budget.MAX_ENTRIES",
    "copies of one request that are listed, staged reads among them": "plan.budget.MAX_LISTED",
    "one copy": "plan.copies.MAX_COPY_BYTES",
    "`kvreshard plan --tokens`": "cli.plan.MAX_TOKENS",
    "a `config.json`": "catalog.entries.MAX_CONFIG_BYTES",
    "a flight record": "tools.flight.MAX_FLIGHT_BYTES",
}
UNITS = {"KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}


def texts() -> list[tuple[str, str]]:
    return [(page.name, page.read_text()) for page in PAGES]


@cache
def reference(name: str) -> str:
    return (DOCS / "reference" / name).read_text()


@pytest.mark.parametrize(("page", "text"), texts())
def test_options_exist(page: str, text: str) -> None:
    named = set(re.findall(r"(?<=[`\"])[a-z]+(?:_[a-z]+)+(?=[`\"])", text))
    known = set(Options.__struct_fields__) | set(OF_NIXL_CONNECTOR) | OTHERS
    assert {name for name in named if not name.startswith("kvreshard_")} <= known, page


@pytest.mark.parametrize(("page", "text"), texts())
def test_series_labels_and_alerts_exist(page: str, text: str) -> None:
    series = reference("metrics.md")
    assert [name for name in re.findall(r"`(kvreshard_\w+)", text) if f"`{name}" not in series] == [], page
    values = re.findall(r'`kvreshard_\w+\{\w+="(\w+)"\}`', text)
    assert [value for value in values if f"`{value}`" not in series + reference("failures.md")] == [], page
    rules = (ROOT / "deploy" / "prometheus" / "rules.yaml").read_text()
    assert [name for name in re.findall(r"`(Kvreshard\w+)`", text) if f"alert: {name}\n" not in rules] == [], page
    causes = re.findall(r'`cause="(\w+)"`', text)
    assert [
        cause for cause in causes if cause not in REASONS and f"| `{cause}` |" not in reference("failures.md")
    ] == []


@pytest.mark.parametrize(("page", "text"), texts())
def test_commands_and_their_options_exist(page: str, text: str) -> None:
    commands = get_command(app).commands  # type: ignore[attr-defined]
    text = text.replace("\\\n", "")
    lines = re.findall(r"`(kvreshard [a-z][^`\n]*)`", text) + re.findall(r"^(kvreshard [a-z].*)$", text, re.MULTILINE)
    for line in lines:
        _, name, *words = shlex.split(line, comments=True)
        known = {
            option for parameter in commands[name].params for option in (*parameter.opts, *parameter.secondary_opts)
        }
        assert {word for word in words if word.startswith("--")} <= known, f"{page}: {line}"
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:^|`)make ([a-z-]+)", text, re.MULTILINE)) <= targets, page


def test_bounds_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| ([^|]+) \| ([\d,]+) ?(\w*) \| [^|]+ \|$", LIMITS.read_text(), re.MULTILINE)
    assert [what for what, _, _ in rows] == list(BOUNDS)
    for what, number, unit in rows:
        module, _, name = BOUNDS[what].rpartition(".")
        found = getattr(importlib.import_module(f"kvreshard.{module}"), name)
        assert found == int(number.replace(",", "")) * UNITS.get(unit, 1), what


def test_what_a_page_names_in_a_file_is_there() -> None:
    for page in DOCS.rglob("*.md"):
        for name, place in re.findall(r"`([A-Za-z_]\w*)` in `([a-z_]+/[a-z_]+\.py)`", page.read_text()):
            file = ROOT / "src" / "kvreshard" / place
            assert re.search(rf"\b{name}\b", file.read_text()), f"{page.name}: {name} in {place}"


def test_the_note_on_observers_lists_their_methods() -> None:
    (note,) = (page.read_text() for page in (DOCS / "design").glob("0054-*.md"))
    named = {name for row in re.findall(r"^\| (`[^|]+) \|", note, re.MULTILINE) for name in re.findall(r"`(\w+)", row)}
    assert named <= {*dir(observer), *dir(observer.Observer), *dir(observer.LoadObserver)}


def test_pages_say_how_long_and_how_many_questions_are_held() -> None:
    security, early = (ROOT / "SECURITY.md").read_text(), (DOCS / "howto" / "early-reads.md").read_text()
    (decision,) = (page.read_text() for page in (DOCS / "design").glob("0010-*.md"))
    assert f"holds {MAX_HELD} questions, {HOLD_S:g} seconds each" in security
    assert f"a listener may take {HOLD_S:g} s to say" in early
    assert f"| {MAX_HELD}, for {HOLD_S:g} s each |" in decision


@pytest.mark.parametrize("part", [Flight, FlightSide, Request])
def test_every_key_of_a_flight_record_is_on_its_page(part: type[msgspec.Struct]) -> None:
    page = (DOCS / "flight-recorder.md").read_text()
    assert [name for name in part.__struct_fields__ if f"`{name}`" not in page] == []
