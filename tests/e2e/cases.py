"""Which pairs of engines must work, and what does vLLM's own connector do with each?

The table of `ReshardConnector`'s issue. A row is a model and the shapes of its two engines; `in_tree` is what was measured
with the unpatched NixlConnector of vLLM 0.32.0, and is asserted too: a change there is either a new vLLM or a fault in
this harness.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

from tests.e2e.engine import RELEASE, EngineSpec
from tests.e2e.zoo import MODELS

from kvreshard.model.changed import replace

IN_TREE, OURS = "NixlConnector", "ReshardConnector"
EXACT, WRONG, REFUSED = "exact", "wrong", "refused"


@dataclass(frozen=True, slots=True)
class Shape:
    """What of an engine differs between the two sides. `page`: tokens per page asked for, None for vLLM's choice; `vllm`: its release."""

    tp: int = 1
    pp: int = 1
    dp: int = 1
    page: int | None = None
    arguments: tuple[tuple[str, object], ...] = ()
    vllm: str = RELEASE

    def __str__(self) -> str:
        words = [f"tp{self.tp}"] + [f"{name}{n}" for name, n in (("pp", self.pp), ("dp", self.dp)) if n > 1]
        words += [f"page{self.page}"] if self.page else []
        words += [f"vllm{self.vllm}"] if self.vllm != RELEASE else []
        return "-".join(words + [name for name, _ in self.arguments])


@dataclass(frozen=True, slots=True)
class Case:
    """One row of the table. `ci`: small enough for every run of CI, which asks vLLM's own connector only where it is `WRONG`."""

    family: str
    model: str
    prefill: Shape
    decode: Shape
    in_tree: str
    ci: bool = False

    @property
    def name(self) -> str:
        return f"{self.model}-{self.prefill}-to-{self.decode}"

    @property
    def seed(self) -> int:
        """Prompts of a case are its own, so that no engine in the pool has them cached from another."""
        return zlib.crc32(self.name.encode()) % 100000

    def engine(self, shape: Shape, connector: str, role: str = "kv_producer") -> EngineSpec:
        """The engine of that shape. One engine serves as either side of several rows, but never as both of one."""
        return EngineSpec(
            self.model,
            tp=shape.tp,
            pp=shape.pp,
            dp=shape.dp,
            block_size=shape.page,
            connector=connector,
            role=role if self.prefill == self.decode else "kv_both",
            prefix_caching=MODELS[self.model].prefix_caching,
            record=True,
            arguments=shape.arguments,
            vllm=shape.vllm,
        )

    def ordinary(self, tp: int, page: int | None = None) -> EngineSpec:
        """An engine that is nobody's side, and records its pages too."""
        shape = Shape(tp, page=page, vllm=self.decode.vllm)
        return replace(self.engine(shape, "RecordConnector"), prefix_caching=False)


def rows(family: str, model: str, in_tree: dict[str, str], ci: tuple[str, ...] = ()) -> list[Case]:
    """Cases of one model: pairs of TP sizes like '1->2', and what the in-tree connector does."""
    cases = []
    for pair, outcome in in_tree.items():
        prefill, decode = (Shape(int(size)) for size in pair.split("->"))
        cases.append(Case(family, model, prefill, decode, outcome, pair in ci))
    return cases


def every(pairs: str, outcome: str) -> dict[str, str]:
    return dict.fromkeys(pairs.split(), outcome)


# With a window the in-tree connector is wrong for one prompt of the ladder at least (docs/design/0024).
_GEMMA4 = {**every("1->2 2->1 1->4 2->4", WRONG), **every("4->1 4->2", REFUSED)}
_GEMMA4_WIDE = {**every("1->2 2->1", WRONG), **every("1->4 2->4 4->1 4->2", REFUSED)}
CASES: list[Case] = [
    *rows("Llama (4 KV heads)", "llama", every("1->2 2->1 1->4 4->1 4->2", EXACT), ci=("1->2",)),
    *rows(
        "Qwen3 (2 KV heads)", "qwen3", {**every("1->2 2->1 1->4", EXACT), **every("4->1 4->2", REFUSED)}, ci=("4->2",)
    ),
    *rows("Gemma-3", "gemma3", every("1->2 2->1", WRONG)),
    *rows("Llama-4 (chunks)", "llama4", every("1->2 4->2", REFUSED), ci=("1->2",)),
    *rows("gpt-oss", "gpt-oss", every("1->2 2->1", WRONG)),
    *rows("Gemma-4 (window 4x32, global 2x64)", "gemma4", _GEMMA4, ci=("1->4", "4->1")),
    *rows("Gemma-4 (window 8x32, global 2x64)", "gemma4-wide", _GEMMA4_WIDE),
    *rows("DeepSeek-V2 (MLA)", "deepseek-v2", every("1->2 2->1 2->4 4->2", EXACT)),
    *rows("DeepSeek-V3 (MLA)", "deepseek-v3", every("1->2 2->1 2->4 4->2", EXACT)),
    *rows("Nemotron-H (4 groups)", "nemotron-h", every("1->2 2->1 4->2", EXACT)),
    *rows("Falcon-H1 (4 groups)", "falcon-h1", every("1->2 2->1 4->2", EXACT)),
    *rows("Granite hybrid (1 group)", "granite-hybrid", every("1->2 2->1", WRONG), ci=("1->2", "2->1")),
    *rows("Qwen3-Next (GDN, bf16)", "qwen3-next", every("1->2 2->1", EXACT)),
    Case("Llama, page size", "llama", Shape(page=64), Shape(page=128), WRONG, ci=True),
    Case("Llama, page size", "llama", Shape(page=128), Shape(page=64), REFUSED),
    Case("Llama, page size", "llama", Shape(2, page=64), Shape(1, page=128), REFUSED),
    Case("Llama, page size", "llama", Shape(1, page=64), Shape(2, page=128), WRONG),
    Case("Llama, pipeline stages", "llama", Shape(1, pp=2), Shape(2), REFUSED),
    Case("Llama, pipeline stages", "llama", Shape(2), Shape(1, pp=2), EXACT),
    Case("Gemma-3, pipeline stages", "gemma3", Shape(1, pp=2), Shape(2), REFUSED),
    Case("Gemma-3, pipeline stages", "gemma3", Shape(2), Shape(1, pp=2), REFUSED),
    Case("Llama, data parallel", "llama", Shape(1, dp=2), Shape(1, dp=2), EXACT),
    Case("Llama, data parallel", "llama", Shape(1, dp=2), Shape(1), EXACT),
    *rows("Mixtral (MoE)", "mixtral", every("1->2 2->1", EXACT)),
    *rows("Qwen3-MoE", "qwen3-moe", every("1->2 2->1", EXACT)),
    *rows("Llama with an Eagle-3 draft", "llama-eagle3", every("1->2 2->1", EXACT)),
    *rows("DeepSeek-V3 with its MTP layer", "deepseek-mtp", every("1->2 2->1", EXACT)),
    *rows("Qwen3-Next with its MTP layer", "qwen3-next-mtp", every("1->2 2->1", EXACT), ci=("1->2",)),
    *rows("Llama (3 KV heads)", "llama-three", every("1->3 3->1", EXACT)),
    Case("Llama (3 KV heads), page size", "llama-three", Shape(3, page=96), Shape(1, page=160), REFUSED),
    *rows("Gemma-2", "gemma2", every("1->2", WRONG)),
    Case("Gemma-2 (3 KV heads), page size", "gemma2-three", Shape(1, page=32), Shape(3, page=96), WRONG, ci=True),
    Case("Gemma-2 (3 KV heads), page size", "gemma2-three", Shape(3, page=96), Shape(1, page=32), REFUSED),
    *rows("Gemma-3n (layers share caches)", "gemma3n", every("1->2", WRONG)),
    Case("Gemma-3n (layers share caches), page size", "gemma3n", Shape(4, page=32), Shape(2, page=96), REFUSED),
    *rows("OLMo-3", "olmo3", every("1->2", WRONG)),
    *rows("EXAONE-4", "exaone4", every("1->2", WRONG)),
    *rows("Mistral (windows only)", "mistral", every("1->2", WRONG)),
    *rows("GLM-4.5 (MoE)", "glm4-moe", every("1->2", EXACT)),
    *rows("Nemotron-H (3 groups)", "nemotron-h-three", every("1->3 3->1", EXACT)),
    *rows("Zamba-2 (layers share weights)", "zamba2", every("1->2 2->1", EXACT)),
    *rows("Mamba-2 (states only)", "mamba2", every("1->2 2->1", REFUSED), ci=("1->2",)),
]
