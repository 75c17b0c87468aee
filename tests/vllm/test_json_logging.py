"""Does the example's configuration write kvreshard's lines as JSON, with their names and fields?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("vllm")
pytestmark = pytest.mark.vllm

ROOT = Path(__file__).parents[2]
CONFIGURATION = ROOT / "examples" / "vllm" / "json_logging.json"
LINES = """
import kvreshard.vllm
from kvreshard.session.commands import Failure, RemoteEngine
from kvreshard.session.handshake_messages import Address
from kvreshard.vllm.outcomes import OutcomeLog
from vllm.logger import _configure_vllm_root_logger, init_logger

_configure_vllm_root_logger()  # since 0.32 a server does it when it has read its arguments
init_logger("vllm.ours").info("a line of vLLM")
log = OutcomeLog(print)
log.add({"r\\n1": {0: Failure("stale lease", "the word is 0")}})
log.end("r\\n1", RemoteEngine("prefill-0", "i", Address("10.0.0.1", 5600)))
"""


def test_a_handler_that_writes_json_has_names_and_fields() -> None:
    environment = {**os.environ, "VLLM_LOGGING_CONFIG_PATH": str(CONFIGURATION)}
    environment.pop("VLLM_LOGGING_LEVEL", None)
    done = subprocess.run(
        [sys.executable, "-c", LINES], capture_output=True, text=True, env=environment, check=True, timeout=120
    )
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    theirs, ours = (
        next(line for line in lines if line["name"] == name) for name in ("vllm.ours", "kvreshard.vllm.outcomes")
    )
    assert theirs["message"] == "a line of vLLM"
    assert ours["levelname"] == "WARNING"
    assert ours["message"].startswith(
        "request r\\n1 was not loaded from engine prefill-0 at 10.0.0.1:5600: the word is 0"
    )
    fields = {
        "event": "load_failed",
        "request_id": "r\\n1",
        "cause": "stale lease",
        "engine": "prefill-0",
        "address": "10.0.0.1:5600",
    }
    assert fields.items() <= ours.items()
