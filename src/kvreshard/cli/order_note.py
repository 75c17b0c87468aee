"""A note under a plan: the memory order in which both engines would need far fewer operations for the request, if vLLM has one for the model."""

from __future__ import annotations

from collections.abc import Callable

from kvreshard.cli.inputs import Pair
from kvreshard.cli.output import seconds_text
from kvreshard.cli.plan_view import RequestCost
from kvreshard.model import KvReshardError
from kvreshard.model.text import counted

# With a page's layers side by side a page is one copy, or one per rank that it is read from (docs/design/0072).
PAGES_OUTERMOST = ("BLHNC", "BHLNC")
# A smaller gain is not worth another order.
MIN_GAIN = 4


def order_note(pair: Pair, priced: RequestCost, in_order: Callable[[str], tuple[Pair, RequestCost]]) -> str:
    """One line, empty where no order gains. `in_order`: the same engines and request, both in another order. Raises nothing."""
    fewest, note = _num_operations(priced) // MIN_GAIN, ""
    for order in PAGES_OUTERMOST:
        try:
            other, found = in_order(order)
        except KvReshardError:
            continue
        if set(other.warnings) <= set(pair.warnings) and _num_operations(found) < fewest:
            fewest = _num_operations(found)
            note = (
                f"note: {counted(fewest, 'operation')}, predicted {seconds_text(found.slowest_s)}, with VLLM_KV_CACHE_LAYOUT={order} on both engines "
                f"(order={order} here), where their attention backends have it"
            )
    return note


def _num_operations(priced: RequestCost) -> int:
    return sum(total.num_operations for total in priced.totals)
