"""How does a connector end a request that can be neither loaded nor computed here?

vLLM 0.32 asks a connector how many tokens it has, and computes the rest: there is no answer "none, and do not compute it". A failed
load is no answer either: with `kv_load_failure_policy=recompute` vLLM computes the prompt. What ends a request before it is scheduled,
whatever the policy, is a grammar that could not be compiled (0.32.0, `Scheduler.grammar_compile_error_reqs`). So `refuse` hands the
scheduler such a request: the client gets an error, and the reason is in the log.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.sampling_params import StructuredOutputsParams
from vllm.v1.request import RequestStatus
from vllm.v1.structured_output.request import StructuredOutputRequest

from kvreshard.model import KvReshardError
from kvreshard.model.logs import get_logger

if TYPE_CHECKING:
    from vllm.v1.request import Request

logger = get_logger(__name__)


class RequestRefused(KvReshardError):
    """The request can be neither loaded nor computed here; the message says why."""


def refuse(request: Request, reason: str) -> None:
    """End a request that waits and holds no blocks, with an error to its client, in the scheduler's next step."""
    logger.error("request %s is refused: %s", request.request_id, reason)
    request.structured_output_request = StructuredOutputRequest(
        StructuredOutputsParams(json_object=True), RequestRefused(reason)
    )
    request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
