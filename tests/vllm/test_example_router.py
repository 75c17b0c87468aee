"""The router of the examples: what engines are asked, what clients get, and what becomes of a request whose client or engine goes away."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

import httpx
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from tests.ports import free_ports

from kvreshard.session.handshake_messages import Address
from kvreshard.vllm.params import read_address, transfer_of

pytestmark = [pytest.mark.vllm, pytest.mark.one_release]
ROUTER = Path(__file__).parents[2] / "examples" / "vllm" / "router.py"
PATIENCE_S = 10.0
SIDE_CHANNEL = "10.0.0.1:5600"
PARAMS = {"do_remote_prefill": True, "remote_engine_id": "p", "kvreshard": {"version": 1}}
BACK = {"do_remote_decode": True, "remote_engine_id": "d"}


def load() -> Any:
    spec = importlib.util.spec_from_file_location("example_router", ROUTER)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class FakeEngine:
    """Answers as a vLLM server does, and keeps what it was asked. `status`: of its answers; `slow`: it never finishes."""

    def __init__(self, answer: dict[str, Any], status: int = 200, slow: bool = False) -> None:
        self.answer, self.status, self.slow = answer, status, slow
        self.first = 'data: {"choices": [{"text": "a"}]}\n\n'
        self.asked: list[dict[str, Any]] = []
        self.authorized: list[str | None] = []
        self.num_left = 0
        self.url = ""
        routes = [
            Route("/health", lambda _: PlainTextResponse("")),
            Route("/v1/models", self.models),
            Route("/v1/completions", self.complete, methods=["POST"]),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        self.authorized.append(request.headers.get("authorization"))
        return JSONResponse({"data": [{"id": "m"}]})

    async def complete(self, request: Request) -> Response:
        self.authorized.append(request.headers.get("authorization"))
        body = await request.json()
        self.asked.append({**body, "path": request.url.path})
        if body.get("stream"):
            return StreamingResponse(self.tell(), media_type="text/event-stream")
        if self.slow:
            while not await request.is_disconnected():
                await asyncio.sleep(0.01)
            self.num_left += 1
        return JSONResponse(self.answer, self.status)

    async def tell(self) -> AsyncIterator[str]:
        try:
            yield self.first
            while self.slow:
                await asyncio.sleep(0.01)
                yield ": still here\n\n"
            yield f"data: {json.dumps(self.answer)}\n\n"
            yield "data: [DONE]\n\n"
        finally:
            self.num_left += 1


@contextmanager
def serving(app: Any) -> Iterator[str]:
    """The URL of an application on a loopback port."""
    port = free_ports(1)
    server = uvicorn.Server(
        uvicorn.Config(app, "127.0.0.1", port, loop="asyncio", log_level="error", timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(PATIENCE_S)


def wait_for(what: Any) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


@contextmanager
def routing(
    prefills: list[FakeEngine], decodes: list[FakeEngine], *dead: str, side_channels: list[str] | None = None
) -> Iterator[str]:
    """The URL of a router before these engines, and before prefill engines that are not there."""
    with ExitStack() as stack:
        for engine in (*prefills, *decodes):
            engine.url = stack.enter_context(serving(engine.app))
        urls = [*dead, *(engine.url for engine in prefills)]
        app = load().make_app(urls, [engine.url for engine in decodes], side_channels)
        yield stack.enter_context(serving(app))


def prefill(**more: Any) -> FakeEngine:
    return FakeEngine({"kv_transfer_params": PARAMS}, **more)


def decode(**more: Any) -> FakeEngine:
    return FakeEngine({"choices": [{"text": "said"}], "kv_transfer_params": BACK}, **more)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_an_answer_goes_through_both(path: str) -> None:
    first, second = prefill(), decode()
    body = {"prompt": "x", "max_tokens": 9, "max_completion_tokens": 9, "stream_options": {}}
    with routing([first], [second]) as url:
        answer = httpx.post(url + path, json=body)
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "m"
    assert answer.json()["choices"] == [{"text": "said"}]
    (asked,), (then,) = first.asked, second.asked
    assert asked["path"] == then["path"] == path
    assert (asked["max_tokens"], asked["max_completion_tokens"], asked["stream"]) == (1, 1, False)
    assert "stream_options" not in asked
    assert asked["kv_transfer_params"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (then["kv_transfer_params"], then["max_tokens"]) == (PARAMS, 9)


def test_a_stream_is_passed_on_and_its_conversation_goes_on() -> None:
    first, second = prefill(), decode()
    body = {"prompt": "x", "max_tokens": 9, "stream": True, "conversation_id": "c"}
    with routing([first], [second]) as url:
        with httpx.stream("POST", f"{url}/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line]
        assert answer.headers["content-type"].startswith("text/event-stream")
        httpx.post(f"{url}/v1/completions", json={**body, "stream": False})
    assert [line[:6] for line in lines] == ["data: "] * 3
    assert lines[-1] == "data: [DONE]"
    assert "conversation_id" not in first.asked[0] | second.asked[0]
    assert first.asked[1]["kv_transfer_params"]["remote_engine_id"] == "d"


@pytest.mark.parametrize("conversation", [{}, {"conversation_id": "c"}], ids=["alone", "conversation"])
def test_a_text_may_have_characters_that_end_lines_elsewhere(conversation: dict[str, str]) -> None:
    """vLLM writes them as they are."""
    first, second = prefill(), decode()
    second.first = 'data: {"choices": [{"text": "a\u2028b\u2029c\u0085d"}]}\n\n'
    with routing([first], [second]) as url:
        body = {"prompt": "x", "stream": True, **conversation}
        told = httpx.post(f"{url}/v1/completions", json=body).content.decode()
    assert told == f"{second.first}data: {json.dumps(second.answer)}\n\ndata: [DONE]\n\n"


def test_engines_that_are_gone_are_left_out_and_without_one_the_decode_engine_computes() -> None:
    first, second = prefill(), decode()
    nobody = f"http://127.0.0.1:{free_ports(1)}"
    with routing([first], [second], nobody) as url:
        for _ in range(3):
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200
        wait_for(lambda: httpx.get(f"{url}/health").json()["prefill"] == {nobody: False, first.url: True})
    assert len(first.asked) == 3
    alone = decode()
    with routing([], [alone], nobody) as url:
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 200
    assert alone.asked[0]["kv_transfer_params"] is None


def test_requests_go_to_the_engine_that_has_the_fewest() -> None:
    slow, quick = prefill(slow=True), prefill()
    with routing([slow, quick], [decode()]) as url:
        waiting = threading.Thread(
            target=lambda: httpx.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=PATIENCE_S), daemon=True
        )
        waiting.start()
        wait_for(lambda: slow.asked)
        for _ in range(3):
            httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert (len(slow.asked), len(quick.asked)) == (1, 3)


@pytest.mark.parametrize(("at", "stream"), [("prefill", False), ("decode", False), ("decode", True)])
def test_a_client_that_goes_away_ends_its_request_at_the_engine(at: str, stream: bool) -> None:
    first, second = prefill(slow=at == "prefill"), decode(slow=at == "decode")
    engine = first if at == "prefill" else second
    with routing([first], [second]) as url:
        with httpx.Client() as client:
            if stream:
                with client.stream("POST", f"{url}/v1/completions", json={"prompt": "x", "stream": True}) as answer:
                    lines = answer.iter_lines()  # kept: its end closes the connection
                    assert next(lines)
                    assert not engine.num_left
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{url}/v1/completions", json={"prompt": "x"}, timeout=0.5)
        wait_for(lambda: engine.num_left == 1)


def test_what_cannot_be_answered_says_why() -> None:
    first, second = prefill(status=400), decode()
    with routing([first], [second]) as url:
        for body in (b"{", b"[]"):
            assert "JSON" in httpx.post(f"{url}/v1/completions", content=body).json()["error"]["message"]
        refused = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        assert refused.status_code == 400
        assert "the prefill engine says" in refused.json()["error"]["message"]
    app = load().make_app([], [f"http://127.0.0.1:{free_ports(1)}"])
    with serving(app) as url:
        wait_for(lambda: httpx.get(f"{url}/health").status_code == 503)
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503
        assert httpx.get(f"{url}/v1/models").status_code == 503


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("headers", [{"Authorization": "Bearer secret"}, {}])
def test_the_key_of_the_client_opens_the_engines(headers: dict[str, str], is_early: bool) -> None:
    p, d = prefill(), decode()
    with routing([p], [d], side_channels=[SIDE_CHANNEL] if is_early else None) as url:
        httpx.post(f"{url}/v1/completions", json={"prompt": "a"}, headers=headers).raise_for_status()
        httpx.post(f"{url}/v1/completions", json={"prompt": "a", "stream": True}, headers=headers).raise_for_status()
        httpx.get(f"{url}/v1/models", headers=headers).raise_for_status()
        wait_for(lambda: len(p.authorized) == 2)
    assert p.authorized + d.authorized == [headers.get("Authorization")] * 5


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize(
    ("prompt", "is_several"),
    [(["a", "b"], True), ([[1, 2], [3]], True), (["a"], False), ([[1, 2]], False), ([1, 2], False), ("a", False)],
)
def test_several_prompts_are_computed_where_they_are_answered(prompt: Any, is_several: bool, is_early: bool) -> None:
    """One `transfer_id`, or one answer's parameters, would name the cache of one of them for all."""
    p, d = prefill(), decode()
    with routing([p], [d], side_channels=[SIDE_CHANNEL] if is_early else None) as url:
        httpx.post(f"{url}/v1/completions", json={"prompt": prompt}).raise_for_status()
        wait_for(lambda: len(p.asked) == (not is_several))
    assert len(d.asked) == 1
    assert d.asked[0]["prompt"] == prompt
    assert ("kv_transfer_params" in d.asked[0]) == (not is_several)


def test_a_url_may_end_with_a_slash() -> None:
    first, second = prefill(), decode()
    with ExitStack() as stack:
        first.url, second.url = (stack.enter_context(serving(engine.app)) for engine in (first, second))
        url = stack.enter_context(serving(load().make_app([f"{first.url}/"], [f"{second.url}/"])))
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).json()["choices"] == [{"text": "said"}]
        assert httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "m"
        assert httpx.get(f"{url}/health").json() == {"prefill": {first.url: True}, "decode": {second.url: True}}


def test_models_of_an_engine_that_has_just_gone_are_no_fault_of_the_router() -> None:
    nobody = f"http://127.0.0.1:{free_ports(1)}"
    module = load()
    module.Router.watch = lambda _: asyncio.sleep(PATIENCE_S)  # it has yet to notice
    with serving(module.make_app([], [nobody])) as url:
        answer = httpx.get(f"{url}/v1/models")
    assert answer.status_code == 503
    assert answer.json()["error"]["message"] == "no decode engine answers"


@pytest.mark.parametrize("stream", [False, True])
def test_both_engines_are_asked_at_once_under_one_id(stream: bool) -> None:
    first, second = prefill(), decode()
    body = {"prompt": "x", "max_tokens": 9, "min_tokens": 5, "stream": stream, "stream_options": {}}
    with routing([first], [second], side_channels=[SIDE_CHANNEL]) as url:
        for number in (1, 2):
            answer = httpx.post(f"{url}/v1/completions", json=body)
            assert "said" in answer.text
            wait_for(lambda number=number: len(first.asked) == number)
    transfers = set()
    for asked, then in zip(first.asked, second.asked, strict=True):
        assert (asked["max_tokens"], asked["stream"], then["max_tokens"], then["stream"]) == (1, False, 9, stream)
        assert not {"stream_options", "min_tokens"} & asked.keys()
        params, source = asked["kv_transfer_params"], then["kv_transfer_params"]
        assert (params["do_remote_decode"], params["do_remote_prefill"]) == (True, False)
        assert source["do_remote_prefill"] is True
        # What the engines read of it.
        assert transfer_of(params) == transfer_of(source) == params["transfer_id"]
        assert read_address(source) == Address("10.0.0.1", 5600)
        transfers.add(params["transfer_id"])
    assert len(transfers) == 2


def test_a_decode_engine_does_not_wait_for_the_prefill_engines_answer() -> None:
    first, second = prefill(slow=True), decode()
    with routing([first], [second], side_channels=[SIDE_CHANNEL]) as url:
        for stream in (False, True):
            answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x", "stream": stream}, timeout=PATIENCE_S)
            assert "said" in answer.text
        # Nobody waits for the prefills any more.
        wait_for(lambda: first.num_left == len(first.asked))


def test_the_address_is_that_of_the_prefill_engine_that_is_asked() -> None:
    first, second, nobody = prefill(), decode(), f"http://127.0.0.1:{free_ports(1)}"
    with routing([first], [second], nobody, side_channels=["10.0.0.9:1", SIDE_CHANNEL]) as url:
        wait_for(lambda: httpx.get(f"{url}/health").json()["prefill"] == {nobody: False, first.url: True})
        httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        wait_for(lambda: first.asked)
    assert read_address(second.asked[0]["kv_transfer_params"]) == Address("10.0.0.1", 5600)


def test_where_a_prefill_engine_fails_the_decode_engine_answers() -> None:
    first, second = prefill(status=500), decode()
    with routing([first], [second], side_channels=[SIDE_CHANNEL]) as url:
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
        wait_for(lambda: first.asked)
    assert answer.json()["choices"] == [{"text": "said"}]
    assert "transfer_id" in second.asked[0]["kv_transfer_params"]


def test_where_a_prefill_engine_is_gone_the_decode_engine_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """And is asked alone from then on, also before the next look at its health."""

    async def look(*_: Any) -> None:
        pass

    module, second, nobody = load(), decode(), f"http://127.0.0.1:{free_ports(1)}"
    monkeypatch.setattr(module.Router, "_look", look)
    with serving(second.app) as at, serving(module.make_app([nobody], [at], [SIDE_CHANNEL])) as url:
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).json()["choices"] == [{"text": "said"}]
        wait_for(lambda: httpx.get(f"{url}/health").json()["prefill"] == {nobody: False})
        httpx.post(f"{url}/v1/completions", json={"prompt": "x"})
    first, then = (asked["kv_transfer_params"] for asked in second.asked)
    assert "transfer_id" in first
    assert then is None


def test_where_no_decode_engine_answers_both_requests_end() -> None:
    first = prefill(slow=True)
    with routing([first], [decode(status=400)], side_channels=[SIDE_CHANNEL]) as url:
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 400
        wait_for(lambda: first.num_left == len(first.asked))
    app = load().make_app(["http://127.0.0.1:1"], [f"http://127.0.0.1:{free_ports(1)}"], [SIDE_CHANNEL])
    with serving(app) as url:
        assert httpx.post(f"{url}/v1/completions", json={"prompt": "x"}).status_code == 503


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_ends_both_requests(stream: bool) -> None:
    first, second = prefill(slow=True), decode(slow=True)
    body = {"prompt": "x", "stream": stream}
    with routing([first], [second], side_channels=[SIDE_CHANNEL]) as url:
        with httpx.Client() as client:
            if stream:
                with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                    lines = answer.iter_lines()  # kept: its end closes the connection
                    assert next(lines)
                    wait_for(lambda: first.asked)
                    assert not first.num_left
            else:
                with pytest.raises(httpx.ReadTimeout):
                    client.post(f"{url}/v1/completions", json=body, timeout=0.5)
        wait_for(lambda: (first.num_left, second.num_left) == (1, 1))


def test_a_turn_whose_prefill_reads_the_last_answer_back_waits_for_it() -> None:
    first, second = prefill(), decode()
    body = {"prompt": "x", "conversation_id": "c"}
    with routing([first], [second], side_channels=[SIDE_CHANNEL]) as url:
        for _ in range(2):
            assert httpx.post(f"{url}/v1/completions", json=body).status_code == 200
    back = first.asked[-1]["kv_transfer_params"]
    assert (back["remote_engine_id"], "transfer_id" in back) == ("d", False)
    assert second.asked[1]["kv_transfer_params"] == PARAMS


@pytest.mark.parametrize("name", [None, ""])
def test_requests_that_name_no_conversation_have_none_in_common(name: str | None) -> None:
    first, second = prefill(), decode()
    with routing([first], [second]) as url:
        for _ in range(2):
            assert httpx.post(f"{url}/v1/completions", json={"prompt": "x", "conversation_id": name}).status_code == 200
    assert "remote_engine_id" not in first.asked[1]["kv_transfer_params"]


@pytest.mark.parametrize(
    "words",
    [
        ["--early"],
        ["--side-channel", SIDE_CHANNEL],
        ["--early", "--side-channel", "10.0.0.1"],
        ["--early", "--side-channel", "10.0.0.1:65536"],
    ],
    ids=["none", "without --early", "no port", "no such port"],
)
def test_the_command_line_wants_a_side_channel_of_each_prefill_engine(words: list[str]) -> None:
    command = [sys.executable, str(ROUTER), "--prefill", "http://a", "--decode", "http://b", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 2
    assert "--side-channel" in done.stderr
