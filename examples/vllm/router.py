"""A router between prefill and decode engines, as small as one that can be used can be.

    python examples/vllm/router.py --prefill http://10.0.0.1:8000 --prefill http://10.0.0.2:8000 --decode http://10.0.0.3:8000 --port 8000

1. The request goes to a prefill engine with `max_tokens=1` and `do_remote_decode`: it fills its cache and keeps it.
2. The `kv_transfer_params` of the answer go, as they are, with the same request to a decode engine, which reads the cache and answers. A stream is passed
   on as it comes.
3. Those of the decode engine's answer, which are there with `bidirectional_kv_xfer` on both engines, go to a prefill engine with the next
   turn: it reads back what the decode engine has of the conversation. A client names the conversation in a field of its own,
   `conversation_id`, which no engine sees.

With `--early` both engines are asked at once (docs/howto/early-reads.md), and the decode engine reads the cache while the prompt is computed. Each prefill engine
is then given with the address where it listens for decode engines:

    python examples/vllm/router.py --early --prefill http://10.0.0.1:8000 --side-channel 10.0.0.1:5600 --decode http://10.0.0.3:8000 --port 8000

Both requests have the same `transfer_id`. If the prefill engine fails, the decode engine computes the prompt. The next turn of a conversation goes the
other way, since the prefill engine reads the last answer first.

Of each role the engine with the fewest requests is asked, of those that answered `/health` last time. Without a prefill engine the decode engine
computes the prompt, and so it does with several prompts in one request, since parameters name the cache of one. When a client goes away, its
requests are ended at the engines too. `GET /health` says 200 while a decode engine is there. Engines get the client's `Authorization` header,
so all of them want the same `--api-key`.

It needs httpx, starlette and uvicorn, which vLLM brings along.
"""

import argparse
import asyncio
import contextlib
import json
import logging
import re
import secrets
from collections import OrderedDict
from collections.abc import AsyncIterator, Awaitable, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

logger = logging.getLogger(__name__)

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TIMEOUT_S = 600.0
HEALTH_EVERY_S = 2.0
MAX_CONVERSATIONS = 10_000


@dataclass(eq=False)
class Engine:
    """One server. `num_requests`: under way from here. `side_channel`: where decode engines ask it, as `host:port`; it is then read early."""

    url: str
    side_channel: str = ""
    is_healthy: bool = True
    num_requests: int = 0

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        self.num_requests += 1
        try:
            yield
        finally:
            self.num_requests -= 1


class Gone(Exception):
    """The client has closed its connection."""


class Unanswered(Exception):
    """An engine did not answer, or not with 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status


class Router:
    """All state of a router: its engines, and the parameters of conversations' last answers."""

    def __init__(self, prefill: list[Engine], decode: list[Engine]) -> None:
        self.prefill, self.decode = prefill, decode
        self.answers: OrderedDict[str, dict[str, Any]] = OrderedDict()
        self.client = httpx.AsyncClient(timeout=TIMEOUT_S, limits=httpx.Limits(max_connections=None))

    async def watch(self) -> None:
        """Ask every engine for its health, now and then."""
        while True:
            await asyncio.gather(*map(self._look, [*self.prefill, *self.decode]))
            await asyncio.sleep(HEALTH_EVERY_S)

    async def _look(self, engine: Engine) -> None:
        try:
            engine.is_healthy = (await self.client.get(f"{engine.url}/health", timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            engine.is_healthy = False

    @staticmethod
    def choose(engines: list[Engine]) -> Engine | None:
        """The healthy engine with the fewest requests."""
        return min(
            (engine for engine in engines if engine.is_healthy), key=lambda engine: engine.num_requests, default=None
        )

    async def complete(self, request: Request) -> Response:
        """A completion or a chat, whole or as a stream."""
        try:
            body = await request.json()
        except ValueError:
            return refusal(400, "the body is no JSON")
        if not isinstance(body, dict):
            return refusal(400, "the body is no JSON object")
        conversation = str(body.pop("conversation_id", None) or "")
        try:
            if has_several_prompts(body):
                return await self._answer(request, body, "")
            engine = self.choose(self.prefill)
            if engine is not None and engine.side_channel and conversation not in self.answers:
                return await self._ask_both(engine, request, body, conversation)
            params = await until_gone(request, self._prefill(request, body, conversation))
            return await self._answer(request, {**body, "kv_transfer_params": params}, conversation)
        except Unanswered as error:
            return refusal(error.status, str(error))
        except Gone:
            return Response(status_code=499)

    async def _prefill(self, request: Request, body: dict[str, Any], conversation: str) -> dict[str, Any] | None:
        """Parameters for the decode engine; None where no prefill engine is there."""
        asked = one_token(body, {**self.answers.pop(conversation, {}), **PREFILL})
        while (engine := self.choose(self.prefill)) is not None:
            try:
                with engine.busy():
                    first = await self.client.post(
                        f"{engine.url}{request.url.path}", json=asked, headers=passed(request)
                    )
            except httpx.TransportError:
                engine.is_healthy = False
                continue
            if first.status_code != 200:
                raise Unanswered(first.status_code, f"the prefill engine says: {first.text[:2000]}")
            found = first.json().get("kv_transfer_params")
            return found if isinstance(found, dict) else None
        return None

    async def _ask_both(self, engine: Engine, request: Request, body: dict[str, Any], conversation: str) -> Response:
        """The answer of a decode engine, which reads what `engine` computes meanwhile. Whatever ends the one request ends the other."""
        transfer = secrets.token_hex(16)
        host, _, port = engine.side_channel.rpartition(":")
        source = {"do_remote_prefill": True, "transfer_id": transfer, "remote_host": host, "remote_port": int(port)}
        first = one_token(body, {**PREFILL, "transfer_id": transfer})
        async with contextlib.AsyncExitStack() as beside:
            beside.callback(asyncio.create_task(self._fill(engine, request, first)).cancel)
            return await self._answer(request, {**body, "kv_transfer_params": source}, conversation, beside)

    async def _fill(self, engine: Engine, request: Request, body: dict[str, Any]) -> None:
        """Let an engine compute a prompt. If it fails, the decode engine computes it."""
        try:
            with engine.busy():
                answer = await self.client.post(f"{engine.url}{request.url.path}", json=body, headers=passed(request))
            if answer.status_code != 200:
                logger.warning("the prefill engine at %s says: %s", engine.url, answer.text[:2000])
        except httpx.TransportError as error:
            engine.is_healthy = False
            logger.warning("the prefill engine at %s is gone: %r", engine.url, error)

    async def _answer(
        self,
        request: Request,
        body: dict[str, Any],
        conversation: str,
        beside: contextlib.AsyncExitStack | None = None,
    ) -> Response:
        """The answer of a decode engine. `beside`: is closed when a stream has ended."""
        while (engine := self.choose(self.decode)) is not None:
            async with contextlib.AsyncExitStack() as stack:
                stack.enter_context(engine.busy())
                asked = self.client.stream(
                    "POST", f"{engine.url}{request.url.path}", json=body, headers=passed(request)
                )
                try:
                    answer = await until_gone(request, stack.enter_async_context(asked))
                    if body.get("stream") and answer.status_code == 200:
                        if beside is not None:
                            stack.push_async_exit(beside.pop_all())
                        told = self._pass_on(answer, stack.pop_all(), conversation)
                        return StreamingResponse(told, 200, media_type=answer.headers.get("content-type"))
                    content = await until_gone(request, answer.aread())
                except httpx.ConnectError:
                    engine.is_healthy = False
                    continue
                except httpx.TransportError as error:
                    engine.is_healthy = False
                    raise Unanswered(502, f"the decode engine at {engine.url} is gone: {error!r}") from None
            if answer.status_code == 200:
                self._keep(conversation, json.loads(content))
            return Response(content, answer.status_code, media_type=answer.headers.get("content-type"))
        raise Unanswered(503, "no decode engine answers")

    async def _pass_on(
        self, answer: httpx.Response, stack: contextlib.AsyncExitStack, conversation: str
    ) -> AsyncIterator[bytes]:
        """The events of a stream, as they are. It ends at the engine too when the client goes: this is closed then."""
        async with stack:
            begun = b""
            async for part in answer.aiter_bytes():
                if conversation:
                    # Not `aiter_lines`, for which a line also ends at characters that a text may have, as U+2028.
                    *lines, begun = (begun + part).split(b"\n")
                    for line in lines:
                        if line.startswith(b"data: {"):
                            self._keep(conversation, json.loads(line.removeprefix(b"data: ")))
                yield part

    def _keep(self, conversation: str, answer: dict[str, Any]) -> None:
        params = answer.get("kv_transfer_params")
        if conversation and params:
            self.answers[conversation] = params
            if len(self.answers) > MAX_CONVERSATIONS:
                self.answers.popitem(last=False)

    async def models(self, request: Request) -> Response:
        """What the decode engines serve."""
        while (engine := self.choose(self.decode)) is not None:
            try:
                found = await self.client.get(f"{engine.url}{request.url.path}", headers=passed(request))
            except httpx.TransportError:
                engine.is_healthy = False
                continue
            return Response(found.content, found.status_code, media_type=found.headers.get("content-type"))
        return refusal(503, "no decode engine answers")

    async def health(self, _: Request) -> Response:
        """Which engines are there."""
        found = {
            role: {engine.url: engine.is_healthy for engine in engines}
            for role, engines in (("prefill", self.prefill), ("decode", self.decode))
        }
        return JSONResponse(found, 200 if any(found["decode"].values()) else 503)


async def until_gone(request: Request, work: Awaitable[Any]) -> Any:
    """The result of `work`, which is cancelled when the client goes away. Raises Gone."""
    task, watch = asyncio.ensure_future(work), asyncio.ensure_future(wait_until_gone(request))
    try:
        await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise Gone
    finally:
        for one in (task, watch):
            one.cancel()
        await asyncio.gather(task, watch, return_exceptions=True)


async def wait_until_gone(request: Request) -> None:
    """Until the client has closed its connection. Its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def passed(request: Request) -> dict[str, str]:
    """The headers that an engine gets."""
    return {name: request.headers[name] for name in ("authorization",) if name in request.headers}


def has_several_prompts(body: dict[str, Any]) -> bool:
    """Whether a completion has a list of texts or of lists of tokens, other than one of them."""
    prompt = body.get("prompt")
    return isinstance(prompt, list) and len(prompt) != 1 and not all(isinstance(token, int) for token in prompt)


def one_token(body: dict[str, Any], params: dict[str, Any]) -> dict[str, Any]:
    """The request for a prefill engine, which computes the prompt and one token."""
    asked = {**body, "max_tokens": 1, "stream": False, "kv_transfer_params": params}
    for name in ("stream_options", "min_tokens"):
        asked.pop(name, None)
    if "max_completion_tokens" in body:  # what chats say in place of max_tokens
        asked["max_completion_tokens"] = 1
    return asked


def refusal(status: int, why: str) -> Response:
    """In the form of OpenAI's API."""
    return JSONResponse({"error": {"message": why, "type": "router_error", "code": status}}, status)


def make_app(prefill_urls: list[str], decode_urls: list[str], side_channels: list[str] | None = None) -> Starlette:
    """The router as an application. `side_channels`: of the prefill engines, where both engines are asked at once."""
    places = side_channels or [""] * len(prefill_urls)
    router = Router(
        [Engine(url.rstrip("/"), place) for url, place in zip(prefill_urls, places, strict=True)],
        [Engine(url.rstrip("/")) for url in decode_urls],
    )

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        watching = asyncio.create_task(router.watch())
        yield
        watching.cancel()
        await router.client.aclose()

    routes = [
        *(Route(path, router.complete, methods=["POST"]) for path in ("/v1/completions", "/v1/chat/completions")),
        Route("/v1/models", router.models),
        Route("/health", router.health),
    ]
    return Starlette(routes=routes, lifespan=lifespan)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--prefill", action="append", default=[], help="URL of a prefill engine; may be given several times"
    )
    parser.add_argument(
        "--decode", action="append", required=True, help="URL of a decode engine; may be given several times"
    )
    parser.add_argument("--early", action="store_true", help="ask both engines at once; needs --side-channel")
    parser.add_argument(
        "--side-channel",
        action="append",
        default=[],
        metavar="HOST:PORT",
        help="with --early: where decode engines ask a prefill engine; once for each --prefill, in the same order",
    )
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    if len(chosen.side_channel) != (len(chosen.prefill) if chosen.early else 0):
        parser.error("with --early give one --side-channel for each --prefill, without it none")
    if not all(
        re.fullmatch(r".+:\d{1,5}", place) and int(place.rpartition(":")[2]) < 65536 for place in chosen.side_channel
    ):
        parser.error("--side-channel is HOST:PORT, for example 10.0.0.1:5600")
    for address in (*chosen.prefill, *chosen.decode):
        if not re.fullmatch(r"https?://[^/]+/?", address):
            parser.error(f"{address}: give the URL of an engine, for example http://10.0.0.1:8000")
    if not 0 < chosen.port < 65536:
        parser.error(f"--port {chosen.port}: must be from 1 to 65535")
    print(f"listening at http://{chosen.host}:{chosen.port}", flush=True)
    app = make_app(chosen.prefill, chosen.decode, chosen.side_channel)
    uvicorn.run(app, host=chosen.host, port=chosen.port, log_level="warning")
