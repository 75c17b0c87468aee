"""A real vLLM server, started as a user starts it: nothing forked, nothing replaced.

`python -m vllm.entrypoints.openai.api_server` on a port of the loopback address, waited for until it answers `/health`.
The same `generate` as `tests.e2e.engine.Engine`, over `/v1/completions`, so that the router takes either.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.e2e import engine_log, models, processes
from tests.e2e.arguments import environment_of, plain_arguments, transfer_config
from tests.e2e.engine import EngineFailed, EngineSpec, Leftovers, Output
from tests.e2e.nursery import ENVIRONMENT
from tests.ports import free_ports

ROOT = Path(__file__).resolve().parents[2]
START_SECONDS = 600.0  # some 40 on an idle machine of two cores
TOP = 5


def server_command(spec: EngineSpec, port: int) -> list[str]:
    """What a person would type to have this engine."""
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
    arguments = plain_arguments(spec)
    del arguments["skip_tokenizer_init"]
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            command += [flag] if value else ["--no-" + name.replace("_", "-")]
        else:
            command += [flag, json.dumps(value) if isinstance(value, dict) else str(value)]
    config = transfer_config(spec)
    return command + (["--kv-transfer-config", json.dumps(config)] if config else [])


class HttpEngine:
    """A server process. Use it in a `with` statement. `folder`: where it may write."""

    def __init__(self, spec: EngineSpec, folder: Path) -> None:
        self.spec, self.folder, self.log = spec, folder, folder / "server.log"
        self.port = free_ports(1)
        self._requests = itertools.count()
        self._shared: set[str] = set()
        self.start_seconds = 0.0

    def __enter__(self) -> HttpEngine:
        started = time.monotonic()
        self.folder.mkdir(parents=True, exist_ok=True)
        variables = {
            **os.environ,
            **ENVIRONMENT,
            **environment_of(self.spec, self.folder, free_ports(20)),
            "PYTHONPATH": str(ROOT / "src"),
            **({} if self.spec.compiles else {"TORCHDYNAMO_DISABLE": "1"}),
        }
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                server_command(self.spec, self.port),
                env=variables,
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                # A group, no session: in sessions of their own, engines on two cores starve one another (docs/howto/troubleshooting.md).
                process_group=0,
            )
        try:
            self._await_ready(started)
        except BaseException:  # an interrupt too: nobody else knows of the process
            processes.end_group(self.process.pid)
            raise
        self.start_seconds = time.monotonic() - started
        self._shared = processes.shared_files(processes.members(self.process.pid))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop it as an operator does, with SIGTERM, and look behind. Raises Leftovers."""
        self.process.terminate()
        left_running = processes.wait_until_gone(self.process.pid, 60.0)
        took = processes.end_group(self.process.pid) if left_running else []
        self.process.wait(timeout=10)
        left = processes.remove_shared(self._shared)
        if took or left:
            raise Leftovers(f"{self.spec}: {'; '.join(took) or 'ended by itself'}; left in shared memory: {left}")

    def new_id(self) -> str:
        return f"{self.folder.name}-r{next(self._requests)}"

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        kv_transfer_params: Sequence[dict[str, Any] | None] | None = None,
        request_ids: Sequence[str] | None = None,
        timeout: float = 120.0,
    ) -> list[Output]:
        """All prompts at once, and what came back, in order. Never raises for a request: see `Output.error`."""
        transfers = list(kv_transfer_params or [None] * len(prompts))
        names = list(request_ids or [self.new_id() for _ in prompts])
        with ThreadPoolExecutor(max(1, len(prompts))) as pool:
            asked = [
                pool.submit(self._complete, list(prompt), max_tokens, transfer, name, timeout)
                for prompt, transfer, name in zip(prompts, transfers, names, strict=True)
            ]
            return [answer.result() for answer in asked]

    def get(self, path: str, timeout: float = 10.0) -> str:
        """A page of the server, like `/metrics`."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=timeout) as answer:
            return str(answer.read().decode())

    def _complete(
        self, prompt: list[int], max_tokens: int, transfer: dict[str, Any] | None, name: str, timeout: float
    ) -> Output:
        body = {
            "model": str(models.folder(self.spec.model)),
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "logprobs": TOP,
            "return_tokens_as_token_ids": True,
            **({"kv_transfer_params": transfer} if transfer is not None else {}),
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json", "X-Request-Id": name},
        )
        try:
            with urllib.request.urlopen(request, timeout=timeout) as answer:
                return _output(json.load(answer))
        except urllib.error.HTTPError as error:
            return Output(error=f"HTTP {error.code}: {error.read().decode(errors='replace')[:500]}")
        except OSError as error:
            return Output(error=f"{type(error).__name__}: {error}")

    def _await_ready(self, started: float) -> None:
        while time.monotonic() - started < START_SECONDS:
            if self.process.poll() is not None:
                break
            try:
                self.get("/health", timeout=2)
                return
            except OSError:
                time.sleep(0.3)
        words = "\n".join(engine_log.errors(self.log)) or self.log.read_text(errors="replace")[-2000:]
        raise EngineFailed(f"{self.spec} as a server did not come up: {words}")


def _output(answer: dict[str, Any]) -> Output:
    choice = answer["choices"][0]
    listed = choice.get("logprobs") or {}
    return Output(
        tokens=[_token(text) for text in listed.get("tokens") or []],
        logprobs=[{_token(text): value for text, value in step.items()} for step in listed.get("top_logprobs") or []],
        kv_transfer_params=answer.get("kv_transfer_params"),
        finish_reason=choice.get("finish_reason"),
    )


def _token(text: str) -> int:
    return int(text.removeprefix("token_id:"))
