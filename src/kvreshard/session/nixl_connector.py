"""The handshake of vLLM's own NixlConnector, as far as it takes to tell it from ours and to refuse it in both logs.

Its listener is a ROUTER socket at the same default port as ours, so an engine of one connector may ask one of the other (vLLM 0.30 to 0.33,
`nixl/base_worker.py`, `_nixl_handshake`; `nixl/base_scheduler.py`, `_nixl_handshake_listener`):

| who asks whom | what happens |
|---|---|
| NixlConnector asks ours with `(b"get_meta_msg", pipeline rank, tensor rank)` | `refusal` is the answer. NixlConnector compares its compatibility hash with ours, which is a sentence, and logs both |
| ours asks NixlConnector | it unpacks three values from whatever arrives, and its thread would end where that fails. So our messages are the first of three. It answers with its first rank's payload, which `is_answer` tells |
"""

from __future__ import annotations

import time

import msgspec

GET_METADATA = b"get_meta_msg"
HOW_IT_REFUSES = (
    "this prefill engine's connector is kvreshard's ReshardConnector, which NixlConnector cannot read from: give the decode engine "
    '"kv_connector_module_path":"kvreshard.vllm" as well, or neither of them'
)
# For our log.
WHO_ASKED = (
    "a decode engine asks with vLLM's own NixlConnector, and this engine's connector is kvreshard's ReshardConnector: that engine's requests "
    'fail or are computed there, by its kv_load_failure_policy; give it "kv_connector_module_path":"kvreshard.vllm" as well, or neither of them'
)


class _Payload(msgspec.Struct, frozen=True):
    """vLLM's `NixlHandshakePayload`."""

    compatibility_hash: str
    agent_metadata_bytes: bytes


_request_decoder = msgspec.msgpack.Decoder(tuple[bytes, int, int])
_payload_decoder = msgspec.msgpack.Decoder(_Payload)
_ERRORS = (msgspec.DecodeError, msgspec.ValidationError, RecursionError, UnicodeDecodeError)


def is_request(payload: bytes) -> bool:
    """Whether a NixlConnector asks. Never raises."""
    try:
        word, _, _ = _request_decoder.decode(payload)
    except _ERRORS:
        return False
    return word == GET_METADATA


def refusal() -> tuple[bytes, bytes]:
    """The frames of an answer that a NixlConnector refuses: a payload that fits none of its own, and the time, as it wants both."""
    return msgspec.msgpack.encode(_Payload(HOW_IT_REFUSES, b"")), msgspec.msgpack.encode(time.perf_counter())


def is_answer(reply: bytes) -> bool:
    """Whether the listener of a NixlConnector answered with this. Never raises."""
    try:
        _payload_decoder.decode(reply)
    except _ERRORS:
        return False
    return True
