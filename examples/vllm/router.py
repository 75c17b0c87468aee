"""A router between a prefill and a decode engine, as small as it can be: what every disaggregating proxy of vLLM does.

    python examples/vllm/router.py --prefill http://127.0.0.1:8100 --decode http://127.0.0.1:8200 --port 8000

1. The request goes to the prefill engine with `max_tokens=1` and `do_remote_decode`: it fills its cache and keeps it.
2. The `kv_transfer_params` of the answer go, as they are, with the same request to the decode engine, which reads the cache.
3. Those of the decode engine's answer, which are there with `bidirectional_kv_xfer` on both engines, go to the prefill engine with the next
   turn: it reads back what the decode engine has of the conversation. A client names the conversation in a field of its own,
   `conversation_id`, which no engine sees.
"""

import argparse
from typing import Any

import httpx
import uvicorn
from fastapi import FastAPI, HTTPException, Request, Response

PREFILL = {"do_remote_decode": True, "do_remote_prefill": False}
TIMEOUT_S = 300.0


def make_app(prefill_url: str, decode_url: str) -> FastAPI:
    """The router as an application, for completions and chats; streams are not passed on."""
    app = FastAPI()
    answers: dict[str, dict[str, Any]] = {}

    @app.post("/v1/completions")
    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> Response:
        body, path = await request.json(), request.url.path
        conversation = body.pop("conversation_id", "")
        known = answers.pop(conversation, {})
        one_token = {**body, "max_tokens": 1, "kv_transfer_params": {**known, **PREFILL}}
        if "max_completion_tokens" in body:  # what chats say in place of max_tokens
            one_token["max_completion_tokens"] = 1
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            first = await client.post(f"{prefill_url}{path}", json=one_token)
            if first.status_code != 200:
                raise HTTPException(first.status_code, f"the prefill engine says: {first.text[:2000]}")
            params = first.json().get("kv_transfer_params")
            second = await client.post(f"{decode_url}{path}", json={**body, "kv_transfer_params": params})
        if conversation and second.status_code == 200 and second.json().get("kv_transfer_params"):
            answers[conversation] = second.json()["kv_transfer_params"]
        return Response(second.content, second.status_code, media_type="application/json")

    return app


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--prefill", required=True)
    parser.add_argument("--decode", required=True)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8000)
    chosen = parser.parse_args()
    uvicorn.run(make_app(chosen.prefill, chosen.decode), host=chosen.host, port=chosen.port, log_level="warning")
