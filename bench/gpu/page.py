"""Writes what was seen on GPUs: a sentence into README.md, a table into docs/performance.md, between `<!-- gpu -->` and `<!-- /gpu -->`.

`python -m bench.gpu.page` does it.

Of every part of the kit, the newest run in `results/` in which it came to its end counts. Without any: "not yet run".
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.__main__ import PARTS, ROOT
from bench.gpu.findings import FAILED, PASSED

RESULTS = Path(__file__).with_name("results")
NOT_YET = "Not yet run on a GPU."
PLACE = re.compile(r"(?<=<!-- gpu -->\n).*?(?=<!-- /gpu -->)", re.DOTALL)
WHAT = {
    "wire": "which transport of UCX carries the bytes",
    "contract": "the transport's contract on the device's memory, on both sides and on one",
    "deaths": "a peer killed during a read, regions that come and go, the thread's context",
    "main_job": "`kvreshard verify --device`: four models, three pairs of TP sizes each, every byte",
    "memory": "zeroing and digests, beside the processor's",
    "session": "loads, lease words, new pages, digests through the session",
    "views": "caches as vLLM lays them out for a GPU's backends",
    "streams": "loads beside a long kernel of the engine's stream",
    "staging": "head splits, page sizes, orders: staged beside direct",
    "figures": "loads beside plain copies, posts, an idle rank",
    "leaks": "500 loads: memory, handles, threads",
    "model": "the cost model's constants and choices",
    "orders": "loads with pages outermost in memory",
}


def newest(documents: Sequence[Mapping[str, Any]]) -> dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]]:
    """Part -> the newest run in which it came to its end, and its checks there."""
    found: dict[str, tuple[Mapping[str, Any], list[Mapping[str, Any]]]] = {}
    for document in sorted((one for one in documents if not one["is_rehearsal"]), key=lambda one: one["when"]):
        for part in PARTS:
            checks = [check for check in document["parts"] if check["part"] == part.name]
            if checks and not any(check["check"] == "the whole part" for check in checks):
                found[part.name] = document, checks
    return found


def table(documents: Sequence[Mapping[str, Any]]) -> str:
    """A line per part."""
    found = newest(documents)
    if not found:
        return NOT_YET + "\n"
    lines = ["| part of the kit | what it looks at | checks passed | on |", "|---|---|---|---|"]
    for part in PARTS:
        if part.name not in found:
            lines.append(f"| {part.name} | {WHAT[part.name]} | has not come to its end on a GPU | |")
            continue
        document, checks = found[part.name]
        passed, failed = (sum(check["verdict"] == verdict for check in checks) for verdict in (PASSED, FAILED))
        gpu = document["machine"].get("gpu", {}).get("name", "a GPU")
        count = f"{passed} of {passed + failed}"
        lines.append(f"| {part.name} | {WHAT[part.name]} | {count} | {gpu}, {document['when'][:10]} |")
    return "\n".join(lines) + "\n"


def sentence(documents: Sequence[Mapping[str, Any]]) -> str:
    """All parts together."""
    found = newest(documents)
    if not found:
        return NOT_YET + "\n"
    verdicts = [check["verdict"] for _, checks in found.values() for check in checks]
    passed, failed = verdicts.count(PASSED), verdicts.count(FAILED)
    where = sorted(
        {f"{doc['machine'].get('gpu', {}).get('name', 'a GPU')}, {doc['when'][:10]}" for doc, _ in found.values()}
    )
    left = [part.name for part in PARTS if part.name not in found]
    rest = f" Parts that have not finished on a GPU: {', '.join(f'`{name}`' for name in left)}." if left else ""
    ran = f"Of the checks of the [GPU kit](bench/gpu/README.md) that finished, {passed} of {passed + failed} passed"
    return f"{ran} ({'; '.join(where)}).{rest}\n"


PAGES = {"README.md": sentence, "docs/performance.md": table}


def main() -> None:
    """Rewrite both pages."""
    documents = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(RESULTS.glob("*.json"))]
    for name, write in PAGES.items():
        path = ROOT / name
        text = path.read_text(encoding="utf-8")
        if not PLACE.search(text):
            sys.exit(f"{name} has no place for the results: a line <!-- gpu --> and a line <!-- /gpu -->")
        path.write_text(PLACE.sub(lambda _, write=write: write(documents), text), encoding="utf-8")


if __name__ == "__main__":
    main()
