"""An engine as a person writes it, and what is wrong with what was written.

`tp=4,pp=2,dcp=2,page=16,order=HND`: keys and values, in any order; what is left out is vLLM 0.32's default.

| key | value |
|---|---|
| `tp` | tensor-parallel ranks |
| `pp` | pipeline stages, or the decoder layers of each: `pp=20+21+20` |
| `dcp`, `interleave` | ranks that share the sequence, and how many tokens each takes in turn |
| `pcp` | ranks that a prompt is computed on; they hold the same, or share the sequence where `dcp` says so too |
| `page` | tokens per manager block on one rank, before page sizes of a hybrid are unified |
| `page.<group>` | the same for one group, or one family of groups (`page.window`), after they are |
| `order` | `NHD`, `HND`, or an order of dimensions, block-outermost ones too |
| `conv` | convolution states `dim-first` or `dim-last` |
| `dtype` | of the cache; `auto` is what the model's file declares (`declared`), else the model's |
| `spec` | speculative tokens; above 0, a model's own prediction layers cache too |
| `draft` | `on` or `off`: whether a separate draft model's layers are there; left out: if the model has one |
| `interior`, `kernel` | the inside of an attention page; tokens of a kernel block |
| `pages` | pages of the pool |

Refused: a text that says nothing, an empty part, a part that changes nothing of this engine (`interleave` without `dcp`; more in `engine`), a key or a value with a typo (the nearest one is named), a key given twice, sizes that are not
positive whole numbers in ASCII digits, more ranks than any engine has.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
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
MAX_DIGITS = 20
# Of a word that a person typed, in a message.
MAX_SHOWN = 60
# A description names every rank of an engine; four times the largest that is known.
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


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine as a person writes it. `stages`: decoder layers per pipeline stage, empty for vLLM's own division."""

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

    def __post_init__(self) -> None:
        sizes = {name: getattr(self, name) for name in SIZES}
        sizes |= {f"page.{group}": tokens for group, tokens in self.page_of}
        sizes |= {f"pp (stage {number})": size for number, size in enumerate(self.stages)}
        for key, value in sizes.items():
            if value is not None and not 0 < value <= MAX_SIZE:
                bound = "positive" if value <= 0 else f"at most {MAX_SIZE}"
                raise LayoutError(f"engine option '{key}': {value}; a size must be {bound}")
        if (num_ranks := self.tp * self.pp * self.pcp) > MAX_RANKS:
            more = f" x pcp={self.pcp}" if self.pcp > 1 else ""
            raise LayoutError(
                f"engine option 'tp': {self.tp} x pp={self.pp}{more} are {num_ranks} ranks; at most {MAX_RANKS} are described"
            )
        if self.pages == 1:
            raise LayoutError("engine option 'pages': 1; page 0 stands for no page, so a pool has at least 2")
        if not 0 <= self.spec <= MAX_DRAFTS:
            bound = "must be 0 or more" if self.spec < 0 else f"at most {MAX_DRAFTS}"
            raise LayoutError(f"engine option 'spec': {self.spec} speculative tokens; {bound}")
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
        """What vLLM 0.32 asks of DCP (`config/parallel.py:588`)."""
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
        """The shortest text that reads as this engine."""
        default = EngineSpec()
        shown = {name: getattr(self, name) for name in (*SIZES[:6], "order", "dtype", "spec", "interior", *SIZES[6:])}
        words = [f"{name}={value}" for name, value in shown.items() if name == "tp" or value != getattr(default, name)]
        if self.stages:
            stages = "+".join(map(str, self.stages))
            words = [f"pp={stages}" if word.startswith("pp=") else word for word in words]
        words += [f"page.{group}={tokens}" for group, tokens in self.page_of]
        words += ["conv=dim-first"] if self.conv_dim_first else []
        words += [] if self.draft is None else [f"draft={'on' if self.draft else 'off'}"]
        return ",".join(words)


def parse_engine(text: str) -> EngineSpec:
    """The engine that `text` writes. Raises LayoutError naming key, value, what is allowed and the nearest match."""
    expect(text, str, "an engine", "as in 'tp=4,page=16'")
    given: dict[str, Any] = {}
    page_of: dict[str, int] = {}
    seen: set[str] = set()
    words = [part.strip() for part in text.split(",")]
    if not all(words):
        what = (
            "has a comma with nothing beside it; leave the comma out, and see"
            if any(words)
            else "says nothing; write tp=1 for one rank, and see"
        )
        raise LayoutError(f"engine '{escaped(text, MAX_SHOWN)}': {what} whether a variable of the shell is unset")
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals or not value:
            raise LayoutError(
                f"engine option '{escaped(word, MAX_SHOWN)}': needs a value, as in tp=4; known keys: {', '.join(engine_keys())}"
            )
        if key in seen:
            raise LayoutError(f"engine option '{escaped(key, MAX_SHOWN)}': is given twice; give it once")
        seen.add(key)
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
    return EngineSpec(**given, page_of=tuple(page_of.items()))


def engine_keys() -> list[str]:
    """Every key that an engine may be written with."""
    return [*_READERS, "page.<group>"]


def _count(key: str, value: str, at_least: int = 1) -> int:
    if not re.fullmatch(r"-?[0-9]+", value):  # int() takes 1_0, +2 and digits of other scripts too
        raise LayoutError(f"engine option '{key}': '{escaped(value, MAX_SHOWN)}' is not a whole number")
    if len(value) > MAX_DIGITS:
        raise LayoutError(f"engine option '{key}': a number of {len(value)} digits; a size must be at most {MAX_SIZE}")
    number = int(value)
    if number < at_least:
        raise LayoutError(f"engine option '{key}': {number}; must be at least {at_least}")
    return number


def _one_of(known: Mapping[str, Any]) -> Callable[[str, str], Any]:
    def read(key: str, value: str) -> Any:
        found = {name.casefold(): meant for name, meant in known.items()}.get(value.casefold())
        if found is None:
            raise unknown(f"engine option '{key}': value", value, known)
        return found

    return read


def unknown(what: str, value: str, known: Iterable[str], more: str = "") -> LayoutError:
    """The error for a name that is none of `known`; says which of them is nearest."""
    names = list(known)
    near = difflib.get_close_matches(value.casefold(), [name.casefold() for name in names], 1, 0.5)
    hint = next((f"; did you mean '{name}'?" for name in names if near and name.casefold() == near[0]), "")
    return LayoutError(f"{what} '{escaped(value, MAX_SHOWN)}'{more} is not known; use one of {', '.join(names)}{hint}")


_READERS: Mapping[str, tuple[str, Callable[[str, str], Any]]] = {
    **{name: (name, _count) for name in SIZES},
    "order": ("order", _one_of({name: name for name in (*ALIASES, *ORDERS)})),
    "conv": ("conv_dim_first", _one_of(CONVOLUTIONS)),
    "dtype": ("dtype", _one_of(DTYPES)),
    "spec": ("spec", lambda key, value: _count(key, value, 0)),
    "draft": ("draft", _one_of(SWITCH)),
    "interior": ("interior", _one_of({name: name for name in INTERIORS})),
}
