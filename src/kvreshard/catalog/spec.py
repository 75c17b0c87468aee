"""The options of an engine, and the text in which a user writes them.

`tp=4,pp=2,dcp=2,page=16,order=HND`: keys and values, in any order; defaults are what vLLM 0.32 does with this connector.

| key | value |
|---|---|
| `tp` | tensor-parallel ranks |
| `pp` | pipeline stages, or the decoder layers of each: `pp=20+21+20` |
| `dcp`, `interleave` | ranks that share the sequence, and how many tokens each takes in turn |
| `pcp` | ranks of prefill context parallelism; they hold the same, or with `dcp` share the sequence |
| `page` | tokens per manager block on one rank, before page sizes of a hybrid are unified |
| `page.<group>` | the same for one group, or one family of groups (`page.window`), after unification |
| `order` | `NHD`, `HND`, or an order of dimensions, block-outermost ones too |
| `conv` | convolution states `dim-first` or `dim-last` |
| `dtype` | of the cache; `auto` is the one that the model's file declares (`declared`), else the model's |
| `spec` | speculative tokens; above 0, a model's own prediction layers have caches too |
| `draft` | `on` or `off`: whether the layers of a separate draft model exist; by default if the model has one |
| `interior`, `kernel` | the inside of an attention page; tokens of a kernel block |
| `pages` | pages of the pool |

Refused: an empty text or part, an option that changes nothing (`interleave` without `dcp`; more in `engine`), an unknown key or value (the
error names the nearest), a key given twice, sizes that are not whole numbers in ASCII digits within their bounds, more ranks than
`MAX_RANKS`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from kvreshard.catalog.layers import CACHE_DTYPES, NATIVE, PACKED, PACKED_FP4, PACKED_V4
from kvreshard.kinds.assemble import ALIASES, ORDERS
from kvreshard.kinds.attention import INTERIORS
from kvreshard.model import LayoutError
from kvreshard.model.expect import expect
from kvreshard.model.text import counted, escaped

CONVOLUTIONS: Mapping[str, bool] = {"dim-first": True, "dim-last": False}
SIZES = ("tp", "pp", "dcp", "interleave", "pcp", "page", "kernel", "pages")
MAX_SIZE = 1 << 32
# Of a pool: page 0 stands for no page.
MIN_PAGES = 2
MAX_DIGITS = 20
# Characters of a user's word in an error.
MAX_SHOWN = 60
# A description lists every rank; this is four times the largest known engine.
MAX_RANKS = 1024
MAX_DRAFTS = 1024
SWITCH: Mapping[str, bool] = {"on": True, "off": False}
DTYPES: Mapping[str, str] = {
    **{name: name for name in (NATIVE, *CACHE_DTYPES, PACKED, PACKED_FP4, PACKED_V4)},
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp8": "fp8_e4m3",
}
# The other values of vLLM 0.32's `--kv-cache-dtype` (`config/cache.py`).
UNDESCRIBED = (
    "fp8_inc", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc", "ultraquant_4bit",
    "int4_per_token_head", "int8_per_token_head", "fp8_per_token_head", "nvfp4", "nvfp4_4over6",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """The options of an engine. `stages`: decoder layers per pipeline stage, empty for vLLM's own division. Raises LayoutError."""

    tp: int = 1
    pp: int = 1
    stages: tuple[int, ...] = ()
    dcp: int = 1
    interleave: int = 1
    pcp: int = 1
    page: int | None = None
    page_of: tuple[tuple[str, int], ...] = ()
    order: str | None = None
    conv_dim_first: bool = False
    dtype: str = NATIVE
    spec: int = 0
    draft: bool | None = None
    interior: str = "cell"
    kernel: int | None = None
    pages: int | None = None
    text: str = field(default="", compare=False)
    """As it was written, for people."""

    def __post_init__(self) -> None:
        if self.pages is not None and self.pages < MIN_PAGES:
            raise LayoutError(
                f"engine option 'pages': {self.pages}; page 0 stands for no page, so a pool has at least {MIN_PAGES}"
            )
        sizes = {name: getattr(self, name) for name in (*SIZES, "spec")}
        sizes |= {f"page.{group}": tokens for group, tokens in self.page_of}
        sizes |= {f"pp (stage {number})": size for number, size in enumerate(self.stages)}
        for key, value in sizes.items():
            least, most = (0, MAX_DRAFTS) if key == "spec" else (1, MAX_SIZE)
            if value is not None and not least <= value <= most:
                bound = f"at least {least}" if value < least else f"at most {most}"
                raise LayoutError(f"engine option '{key}': {value}; must be {bound}")
        if (num_ranks := self.tp * self.pp * self.pcp) > MAX_RANKS:
            more = f" x pcp={self.pcp}" if self.pcp > 1 else ""
            raise LayoutError(
                f"engine option 'tp': {self.tp} x pp={self.pp}{more} are {num_ranks} ranks; at most {MAX_RANKS} are described"
            )
        if self.stages and len(self.stages) != self.pp:
            raise LayoutError(
                f"engine option 'pp': {counted(self.pp, 'stage')}, but the layers of {len(self.stages)} are given"
            )
        self._check_sequence()
        for key, value, known in (
            ("order", self.order, [*ALIASES, *ORDERS]),
            ("interior", self.interior, INTERIORS),
            ("dtype", self.dtype, list(DTYPES.values())),
        ):
            if value is not None and value not in known:
                raise unknown(f"engine option '{key}': value", value, known)

    def _check_sequence(self) -> None:
        """The conditions of vLLM 0.32 for DCP (`config/parallel.py:588`)."""
        if self.interleave > 1 and self.dcp == 1:
            raise LayoutError(
                f"engine option 'interleave': {self.interleave}, but without dcp no ranks share the sequence; leave it out, or give dcp"
            )
        if self.pcp == 1 and self.tp % self.dcp:
            raise LayoutError(f"engine option 'dcp': {self.dcp} does not divide tp={self.tp}; use a divisor of it")
        allowed = sorted({1, self.pcp, self.tp * self.pcp})
        if self.pcp > 1 and self.dcp not in allowed:
            raise LayoutError(
                f"engine option 'dcp': {self.dcp} with tp={self.tp},pcp={self.pcp}; ranks of PCP hold the same, or share the sequence "
                f"among them or with those of TP: use one of {', '.join(map(str, allowed))}"
            )

    def __str__(self) -> str:
        return self.text


def parse_engine(text: str) -> EngineSpec:
    """The engine of a text. Raises LayoutError naming key, value, the allowed values and the nearest match."""
    expect(text, str, "an engine", "as in 'tp=4,page=16'")
    given: dict[str, Any] = {}
    page_of: dict[str, int] = {}
    keys: set[str] = set()
    words = [part.strip() for part in text.split(",")]
    if not all(words):
        what = (
            "has a comma with nothing beside it; leave the comma out"
            if any(words)
            else "is empty; write tp=1 for one rank"
        )
        raise LayoutError(f"engine '{escaped(text, MAX_SHOWN)}': {what}, and check whether a shell variable is unset")
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value:
            raise LayoutError(
                f"engine option '{escaped(word, MAX_SHOWN)}': needs a value, as in tp=4; known keys: {', '.join(engine_keys())}"
            )
        if key in keys:
            raise LayoutError(f"engine option '{escaped(key, MAX_SHOWN)}': is given twice; give it once")
        keys.add(key)
        if key.startswith("page.") and len(key) > len("page."):
            page_of[key.removeprefix("page.")] = _count(key, value)
        elif key == "pp" and "+" in value:
            given["stages"] = tuple(_count(key, size.strip()) for size in value.split("+"))
            given["pp"] = len(given["stages"])
        elif key in _READERS:
            name, read = _READERS[key]
            given[name] = read(key, value)
        else:
            raise unknown("engine option", key, engine_keys(), f" (value '{escaped(value, MAX_SHOWN)}')")
    if "interleave" in given and "dcp" not in given:
        raise LayoutError(
            "engine option 'interleave': without dcp no ranks share the sequence; leave it out, or give dcp"
        )
    return EngineSpec(**given, page_of=tuple(page_of.items()), text=text)


def engine_keys() -> list[str]:
    """Every key of an engine text."""
    return [*_READERS, "page.<group>"]


def _count(key: str, value: str) -> int:
    if not re.fullmatch(r"-?[0-9]+", value):  # int() takes 1_0, +2 and digits of other scripts too
        raise LayoutError(f"engine option '{key}': '{escaped(value, MAX_SHOWN)}' is not a whole number")
    if len(value) > MAX_DIGITS:
        raise LayoutError(f"engine option '{key}': a number of {len(value)} digits; must be at most {MAX_SIZE}")
    return int(value)


def _one_of(known: Mapping[str, Any]) -> Callable[[str, str], Any]:
    def read(key: str, value: str) -> Any:
        found = {name.casefold(): meant for name, meant in known.items()}.get(value.casefold())
        if found is None:
            raise unknown(f"engine option '{key}': value", value, known)
        return found

    return read


def _cache_dtype(key: str, value: str) -> Any:
    if value.casefold() in UNDESCRIBED:
        raise LayoutError(
            f"engine option '{key}': vLLM has '{value}', but the pages of such a cache are not described here; ask an engine that runs: "
            "kvreshard doctor --peer HOST:PORT"
        )
    return _one_of(DTYPES)(key, value)


def unknown(what: str, value: str, known: Iterable[str], more: str = "") -> LayoutError:
    """The error for a name that is none of `known`, with the nearest of them."""
    names = list(known)
    near = difflib.get_close_matches(value.casefold(), [name.casefold() for name in names], 1, 0.5)
    hint = next((f"; did you mean '{name}'?" for name in names if near and name.casefold() == near[0]), "")
    return LayoutError(f"{what} '{escaped(value, MAX_SHOWN)}'{more} is not known; use one of {', '.join(names)}{hint}")


_READERS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    **{name: (name, _count) for name in (*SIZES, "spec")},
    "order": ("order", _one_of({name: name for name in (*ALIASES, *ORDERS)})),
    "conv": ("conv_dim_first", _one_of(CONVOLUTIONS)),
    "dtype": ("dtype", _cache_dtype),
    "draft": ("draft", _one_of(SWITCH)),
    "interior": ("interior", _one_of({name: name for name in INTERIORS})),
}
