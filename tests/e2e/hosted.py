"""What runs inside an engine's process: vLLM's `AsyncLLM`, told what to do over a connection.

Requests are `(number, method, arguments)`, answers `(number, worked, result)`; several may be under way, since the
engine batches them. The first answer has number 0 and says that the engine is up, or why it is not.
"""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import threading
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any

from tests.e2e.engine import Picture

TOP = 5
# A producer stays until what it holds for others was read or its lease ran out; vLLM's own 5 s end in a kill.
SHUTDOWN_SECONDS = 40.0


def main(connection: Connection, arguments: dict[str, Any]) -> None:
    """Start an engine with `arguments` of `AsyncEngineArgs`, serve it, and shut it down."""
    tempfile.tempdir = None  # the nursery has looked it up before TMPDIR was ours
    if arguments.pop("sleeps", False):
        from tests.e2e import sleeping

        sleeping.install()
    record = arguments.pop("record", None)
    if record is not None:
        from tests.e2e import recorder

        recorder.install(record)
    from vllm.config import KVTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if arguments.get("kv_transfer_config") is not None:
        arguments["kv_transfer_config"] = KVTransferConfig(**arguments["kv_transfer_config"])
    engine = None
    try:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments))
        asyncio.run(_Host(connection, engine).serve())
    except BaseException as error:  # noqa: BLE001  it is told to the test
        traceback.print_exc()
        connection.send((0, False, f"{type(error).__name__}: {error}"))
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if engine is not None:
            engine.shutdown(timeout=SHUTDOWN_SECONDS)


def _media(picture: Picture | None) -> dict[str, Any]:
    """A picture as vLLM takes it."""
    if picture is None:
        return {}
    import numpy as np
    import torch
    from PIL import Image

    drawn = np.random.default_rng(picture.seed)
    if picture.is_embedded:
        shape = (1, picture.num_tokens, picture.width)
        return {"multi_modal_data": {"image": torch.from_numpy(drawn.normal(size=shape).astype(np.float32))}}
    return {"multi_modal_data": {"image": Image.fromarray(drawn.integers(0, 255, (56, 56, 3), dtype=np.uint8))}}


class _Host:
    def __init__(self, connection: Connection, engine: Any) -> None:
        self.connection, self.engine = connection, engine
        self.sending = threading.Lock()
        self.stop = asyncio.Event()

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self.stop.set)
        threading.Thread(target=self._read, args=(loop,), daemon=True).start()
        config = self.engine.vllm_config
        about = {
            "pid": os.getpid(),
            "block_size": config.cache_config.block_size,
            "engine_id": config.kv_transfer_config.engine_id if config.kv_transfer_config else None,
        }
        self._send(0, True, about)
        await self.stop.wait()

    def _send(self, number: int, worked: bool, result: Any) -> None:
        with self.sending:
            self.connection.send((number, worked, result))

    def _read(self, loop: asyncio.AbstractEventLoop) -> None:
        while True:
            try:
                number, method, arguments = self.connection.recv()
            except (EOFError, OSError):
                loop.call_soon_threadsafe(self.stop.set)
                return
            asyncio.run_coroutine_threadsafe(self._answer(number, method, arguments), loop)

    async def _answer(self, number: int, method: str, arguments: tuple[Any, ...]) -> None:
        try:
            result = await getattr(self, method)(*arguments)
        except BaseException as error:  # noqa: BLE001  it is told to the test
            self._send(number, False, f"{type(error).__name__}: {error}")
        else:
            self._send(number, True, result)

    async def shut_down(self) -> None:
        self.stop.set()

    async def abort(self, request_id: str) -> None:
        await self.engine.abort(request_id)

    async def check_health(self) -> None:
        await self.engine.check_health()

    async def reset_prefix_cache(self) -> bool:
        return bool(await self.engine.reset_prefix_cache())

    async def pause(self, mode: str, clear_cache: bool) -> None:
        await self.engine.pause_generation(mode=mode, clear_cache=clear_cache)

    async def resume(self) -> None:
        await self.engine.resume_generation()

    async def sleep(self, level: int, mode: str) -> None:
        await self.engine.sleep(level=level, mode=mode)

    async def wake_up(self, tags: list[str] | None) -> None:
        await self.engine.wake_up(tags)

    async def get(self, path: str) -> str:
        if path != "/metrics":
            raise ValueError(f"{path}: this engine has no page but /metrics")
        from prometheus_client import generate_latest

        return generate_latest().decode()

    async def generate(
        self,
        request_id: str,
        prompt: list[int],
        max_tokens: int,
        transfer: dict[str, Any] | None,
        rank: int | None,
        picture: Picture | None = None,
    ) -> dict[str, Any]:
        from vllm.sampling_params import SamplingParams

        parameters = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            logprobs=TOP,
            extra_args={"kv_transfer_params": transfer} if transfer is not None else None,
        )
        final, first_token_s = None, None
        async for output in self.engine.generate(
            {"prompt_token_ids": prompt, **_media(picture)}, parameters, request_id, data_parallel_rank=rank
        ):
            final = output
            if first_token_s is None and output.outputs[0].token_ids:
                first_token_s = time.monotonic()
        if final is None:
            raise RuntimeError("the engine returned nothing")
        made = final.outputs[0]
        return {
            "tokens": list(made.token_ids),
            "logprobs": [{token: entry.logprob for token, entry in step.items()} for step in made.logprobs or []],
            "kv_transfer_params": final.kv_transfer_params,
            "finish_reason": made.finish_reason,
            "cached_tokens": final.num_cached_tokens,
            "first_token_s": first_token_s,
        }
