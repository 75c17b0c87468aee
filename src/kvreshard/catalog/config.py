"""The fields of a Hugging Face config.json, read with their types and bounds checked.

A `Config` is the dictionary of the language model with its path in the file (`text_config` of a multimodal model), so that an error names
the field as a person finds it.

1. `language_part` finds that dictionary: the file itself, or the first of `NESTED` in it, in Qwen-Omni inside of `thinker_config`, in
   Moondream under `config.text`.
2. Older families have other names for the same fields: `renamed` maps them, and errors use the names of the file.
3. transformers 5.19 saves the fields that differ between layers as `per_layer_config`: `of_layer` gives the fields of one layer.
4. Each getter takes a name, checks type and range, and returns the value; null counts as absent. `count` and `has` also take a path into
   an object (`attn_config.kv_n_heads`).
5. `dtype` is the one in which vLLM 0.32 runs the model without `--dtype`: that of the file around the language model, else of the language
   model, else of its encoder (`model_arch_config_convertor.py`); float32, and float16 of `NO_FLOAT16`, become bfloat16 (`config/model.py`).

Refused: a field that is missing, of a wrong type or out of range, KV heads that do not divide the query heads, a list of layer types of
another length than `num_hidden_layers` or with an unknown type. Nothing is guessed: a default comes from the caller, or from the family's
row (`family.Family`), which has those of transformers' classes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from kvreshard.kinds.page import DTYPE_BYTES
from kvreshard.model import LayoutError

# Where multimodal models keep the language model: transformers, and two families of older repositories.
NESTED = ("text_config", "language_config", "llm_config")
# The object of audio models that has the language model (`Qwen3OmniMoeConfig.get_text_config`).
SPEAKING = "thinker_config"
# Types whose language model is an object inside another.
INSIDE: Mapping[str, str] = {"moondream3": "config.text"}
# Files of these keep the fields of the language model beside those of the encoder, and transformers makes its text configuration of them.
FLAT: Mapping[str, str] = {"qwen2_vl": "qwen2_vl_text", "qwen2_5_vl": "qwen2_5_vl_text"}
NO_MODEL_TYPE = (
    "give a text; is this the config.json of a model? A layout file goes to `kvreshard plan` without --model"
)
SHOWN_CHARACTERS = 60
DTYPE_NAMES = ("dtype", "torch_dtype")
# In which vLLM runs a model (`config/model.py:2366`).
MODEL_DTYPES = ("float32", "bfloat16", "float16")
ENCODERS = ("vision_config", "encoder_config")
# Files of these have no `model_type` (`transformers_utils/config.py:137`).
UNTYPED: Mapping[str, str] = dict.fromkeys(("LongcatFlashForCausalLM", "LongcatFlashNgramForCausalLM"), "longcat_flash")
# Families that vLLM does not run in float16, by the type of the whole file.
NO_FLOAT16 = ("gemma2", "gemma3", "gemma3_text", "glm4")
CAST_TO = "bfloat16"
PER_LAYER = "per_layer_config"
# Far above every known model; a description beyond takes too much memory and time.
MAX_LAYERS, MAX_COUNT = 10_000, 1 << 32
_LAYER_NUMBER = re.compile("[0-9]{1,6}")


Source = int | str | tuple[str, ...] | Callable[["Config"], int]
"""A number, the field that has it, several fields of which the first present one has it, or a function that computes it."""

PER_QUERY_HEAD = "num_attention_heads"
"""For `kv_heads`: as many KV heads as query heads."""
DERIVED = "hidden_size / num_attention_heads"
"""For `head_size`: as the configuration class computes it."""


@dataclass(frozen=True, slots=True)
class Config:
    """The fields of one language model. `path`: where they lie in the file; `outer`: the fields of the file around them.

    `names`: usual name -> name in the file. `usual_kv_heads`, `usual_head_size`: the family's defaults, for fields that the file leaves out.
    """

    model: str
    fields: Mapping[str, Any]
    path: str = ""
    outer: Mapping[str, Any] | None = None
    names: Mapping[str, str] = field(default_factory=dict)
    usual_kv_heads: int | str | None = None
    usual_head_size: int | str | None = None

    @property
    def model_type(self) -> str:
        return self.text("model_type", NO_MODEL_TYPE)

    def has(self, name: str) -> bool:
        return self._value(name) is not None

    def _value(self, name: str) -> Any:
        """A field, or one of an object inside: `outer.inner`."""
        outer, _, inner = name.partition(".")
        return self.part(outer)._value(inner) if inner else self.fields.get(name)

    def error(self, name: str, fact: str, remedy: str) -> LayoutError:
        return LayoutError(
            f"config of '{self.model}', field '{self.path}{self.names.get(name, name)}': {fact}; {remedy}"
        )

    def with_fields(self, **fields: Any) -> Config:
        """The same with these values for some fields."""
        return replace(self, fields={**self.fields, **fields})

    def renamed(self, names: Mapping[str, str]) -> Config:
        """The same with fields under their usual names. `names`: usual name -> name in the file."""
        used = {usual: own for usual, own in names.items() if self.has(own) or not self.has(usual)}
        found = self.with_fields(**{usual: self.fields.get(own) for usual, own in used.items()})
        return replace(found, names={**self.names, **used})

    def of_layer(self, index: int) -> Config:
        """The fields of decoder layer `index`, with those of `per_layer_config`, whose keys are layer numbers as texts."""
        found = self.part(PER_LAYER).fields
        for key, fields in found.items():
            if not _LAYER_NUMBER.fullmatch(str(key)) or not isinstance(fields, Mapping):
                raise self.error(
                    PER_LAYER, f"has {_shown({key: fields})}", "give an object with fields per layer number"
                )
        own = [fields for key, fields in found.items() if int(key) == index]
        return self.with_fields(**{name: value for fields in own for name, value in fields.items()})

    def count(self, name: str, default: int | None = None, *, at_least: int = 1) -> int:
        """A whole number, by default positive."""
        value = self._value(name)
        if value is None and default is not None:
            return default
        if value is None:
            is_zero = name == "sliding_window" and name in self.fields  # which the reader has made null
            raise self.error(
                name,
                "is null or 0" if is_zero else "is missing",
                "it shapes the cache; add it to a copy of the file, as the model was made",
            )
        if isinstance(value, bool) or not isinstance(value, int):
            raise self.error(name, f"is {_shown(value)}", "give a whole number")
        at_most = MAX_LAYERS if name.endswith(("layers", "modules")) else MAX_COUNT
        if not at_least <= value <= at_most:
            bound = f"at least {at_least}" if value < at_least else f"at most {at_most}"
            raise self.error(name, f"is {_shown(value)}", f"it must be {bound}")
        return value

    def number(self, source: Source) -> int:
        """The number that a row of the table refers to."""
        match source:
            case str():
                return self.count(source)
            case tuple():
                return self.count(next((name for name in source if self.has(name)), source[-1]))
            case int():
                return source
            case _:
                return source(self)

    def flag(self, name: str, default: bool) -> bool:
        value = self.fields.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"is {_shown(value)}", "give true or false")
        return value

    def text(self, name: str, remedy: str = "give a text") -> str:
        value = self.fields.get(name)
        if not isinstance(value, str) or not value:
            raise self.error(name, "is missing" if value is None else f"is {_shown(value)}", remedy)
        return value

    def entries(self, name: str, length: int, allowed: Mapping[str, str]) -> tuple[str, ...]:
        """A list with one text per decoder layer, each translated by `allowed`."""
        value = self._list(name, "give one entry per layer")
        if not value:
            raise self.error(name, f"is {_shown(value)}", "give one entry per layer")
        self._check_length(name, value, length)
        for index, entry in enumerate(value):
            if not isinstance(entry, str) or entry not in allowed:
                raise self.error(
                    f"{name}[{index}]", f"is {_shown(entry)}", f"known here are {', '.join(map(repr, allowed))}"
                )
        return tuple(allowed[entry] for entry in value)

    def numbers(self, name: str, length: int, *, spare: int = 0, null: int | None = None) -> tuple[int, ...]:
        """A list with one whole number per decoder layer, none negative. Up to `spare` more entries are ignored. `null`: stands for null."""
        remedy = "give one number per layer" if null is None else "give one number, or null, per layer"
        value: list[Any] = [null if entry is None else entry for entry in self._list(name, remedy)]
        self._check_length(name, value, length, spare)
        for index, entry in enumerate(value):
            if isinstance(entry, bool) or not isinstance(entry, int) or entry < 0:
                raise self.error(f"{name}[{index}]", f"is {_shown(entry)}", "give a whole number that is not negative")
            if entry > MAX_COUNT:
                raise self.error(f"{name}[{index}]", f"is {_shown(entry)}", f"it must be at most {MAX_COUNT}")
        return tuple(value[:length])

    def positions(self, name: str, length: int, *, first: int = 1, needed: bool = True) -> frozenset[int]:
        """A list of decoder layers by number, counted from `first`, each at most once. An absent list is empty unless `needed`."""
        if not needed and not self.has(name):
            return frozenset()
        found: set[int] = set()
        for index, entry in enumerate(self._list(name, "list the layers")):
            if isinstance(entry, bool) or not isinstance(entry, int) or not first <= entry < first + length:
                raise self.error(
                    f"{name}[{index}]", f"is {_shown(entry)}", f"give numbers from {first} to {first + length - 1}"
                )
            if entry in found:
                raise self.error(f"{name}[{index}]", f"is {entry} again", "list every layer once")
            found.add(entry)
        return frozenset(found)

    def _list(self, name: str, remedy: str) -> Sequence[Any]:
        value = self.fields.get(name)
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(name, "is missing" if value is None else f"is {_shown(value)}", remedy)
        return value

    def _check_length(self, name: str, value: Sequence[Any], length: int, spare: int = 0) -> None:
        if not length <= len(value) <= length + spare:
            raise self.error(name, f"has {len(value)} entries for {length} decoder layers", "give one entry per layer")

    def element(self, name: str, index: int) -> Config:
        """The fields of an object in a list; none if the entry is no object."""
        value = self.fields[name][index]
        return Config(self.model, value if isinstance(value, Mapping) else {}, f"{self.path}{name}[{index}].")

    def part(self, name: str) -> Config:
        """The fields of an object; none if it is absent."""
        value = self.fields.get(name)
        if value is not None and not isinstance(value, Mapping):
            raise self.error(name, f"is {_shown(value)}", "give an object with named fields")
        return Config(self.model, value or {}, f"{self.path}{name}.", self.outer)

    def must_be(self, name: str, *allowed: object) -> None:
        """Refuse a field with another value than these, whose caches are not described. An absent field is accepted."""
        value = self.fields.get(name)
        if value is not None and value not in allowed:
            raise self.error(name, f"is {_shown(value)}", "caches of that shape are not described")

    def dtype_field(self) -> tuple[Config, str] | None:
        """The first place where vLLM finds a dtype, good or bad, and the name of its field. None if the file has none."""
        around = Config(self.model, self.outer or {})
        encoders = [around.part(name) for name in ENCODERS if isinstance(around.fields.get(name), Mapping)]
        found = ((place, name) for place in (around, self, *encoders) for name in DTYPE_NAMES if place.has(name))
        return next(found, None)

    def declared_dtype(self) -> str:
        """The dtype that the file declares: `dtype`, or `torch_dtype` in older ones."""
        found = self.dtype_field()
        if found is None:
            raise self.missing_dtype("add it to a copy of the file, as the model was made")
        place, name = found
        value = place.fields[name]
        short = value.removeprefix("torch.") if isinstance(value, str) else value
        if not isinstance(short, str) or short not in MODEL_DTYPES:
            raise place.error(name, f"is {_shown(value)}", f"use one of {', '.join(MODEL_DTYPES)}")
        return short

    def dtype(self) -> str:
        """The dtype in which vLLM runs the model."""
        declared = self.declared_dtype()
        whole = self.fields if self.outer is None else self.outer
        is_cast = declared == "float32" or (declared == "float16" and whole.get("model_type") in NO_FLOAT16)
        return CAST_TO if is_cast else declared

    def missing_dtype(self, remedy: str) -> LayoutError:
        """Absent means float32 to transformers, but vLLM then reads the weights (`model_arch_config_convertor.py`)."""
        return self.error("dtype", "is missing, and the weights that have it are not read here", remedy)

    def state_dtype(self, name: str, default: str) -> str:
        """The dtype of a recurrent state; `auto` is the default."""
        value = self.fields.get(name)
        if value is None or value == "auto":
            return default
        if not isinstance(value, str) or value not in DTYPE_BYTES:
            raise self.error(name, f"is {_shown(value)}", f"use one of auto, {', '.join(DTYPE_BYTES)}")
        return value

    def head_size(self) -> int:
        """`head_dim`, else the default of the family."""
        known = self._default("head_dim", self.usual_head_size)
        if known is not None or self.usual_head_size != DERIVED:
            return self.count("head_dim", known)
        hidden, heads = self.count("hidden_size"), self.count("num_attention_heads")
        if hidden % heads:
            raise self.error(
                "head_dim", f"is missing, and hidden_size {hidden} is no multiple of {heads} heads", "give head_dim"
            )
        return hidden // heads

    def num_kv_heads(self) -> int:
        """`num_key_value_heads`, else the default of the family."""
        name = "num_key_value_heads"
        known, num_heads = self._default(name, self.usual_kv_heads), self.count("num_attention_heads")
        num_kv_heads = self.count(name, num_heads if self.usual_kv_heads == PER_QUERY_HEAD else known)
        if num_heads % num_kv_heads:
            raise self.error(
                name,
                f"is {num_kv_heads}{'' if self.has(name) else ' by default'}, which does not divide num_attention_heads {num_heads}",
                "every KV head serves as many query heads",
            )
        return num_kv_heads

    def _default(self, name: str, known: int | str | None) -> int | None:
        """The field, or the number `known` where it is absent. With a known number null is refused: most classes then compute another."""
        if self.has(name):
            return self.count(name)
        if not isinstance(known, int):
            return None
        if name in self.fields:
            raise self.error(
                name,
                f"is null, which is not the {known} of a '{self.model_type}' file without it",
                "give the number, or leave the field out",
            )
        return known


def language_part(model: str, raw: Mapping[str, Any]) -> Config:
    """The fields of the language model of a file. Raises LayoutError if the file holds no object."""
    if not isinstance(raw, Mapping):
        raise LayoutError(f"config of '{model}': holds {_shown(raw)}; it must be a JSON object with named fields")
    if raw.get("model_type") is None and isinstance(listed := raw.get("architectures"), Sequence):
        known = [UNTYPED[name] for name in listed if isinstance(name, str) and name in UNTYPED]
        raw = {**raw, "model_type": known[0]} if known else raw
    path, around = "", raw
    if isinstance(raw.get(SPEAKING), Mapping):
        dtypes = {name: value for name in DTYPE_NAMES if (value := raw.get(name)) is not None}
        path, around = f"{SPEAKING}.", {**raw, **raw[SPEAKING], **dtypes}
    for name in NESTED:
        inner = around.get(name)
        if isinstance(inner, Mapping):
            fields = inner if inner.get("model_type") else {**inner, "model_type": around.get("model_type")}
            return _inside(Config(model, fields, f"{path}{name}.", around))
    kind = raw.get("model_type")
    if isinstance(kind, str) and kind in FLAT:
        return Config(model, {**raw, "model_type": FLAT[kind]})
    return _inside(Config(model, raw))


def _inside(config: Config) -> Config:
    kind = config.fields.get("model_type")
    if not isinstance(kind, str) or kind not in INSIDE:
        return config
    part = config
    for name in INSIDE[kind].split("."):
        part = part.part(name)
    return replace(part, fields={**part.fields, "model_type": kind}, outer={**config.fields, **(config.outer or {})})


def _shown(value: object) -> str:
    text = f"a number of {value.bit_length()} bits" if isinstance(value, int) and abs(value) >= 1 << 64 else repr(value)
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 3] + "..."
