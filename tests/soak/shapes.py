"""Which engines take part in a soak, and who reads from whom?

Three models, each cut in another way by each of its engines: tensor parallel sizes, page sizes, head-major and token-major
pages; heads, a latent that every rank holds, and a hybrid of full attention, a sliding window and recurrent states in one
pool. Every decode engine reads from every prefill engine of its model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from kvreshard.kinds import Attention, Latent, Mamba2
from kvreshard.kinds.assemble import Grid, Layer, PagedGroup, assemble
from kvreshard.model import EngineLayout

MAX_TOKENS = 1024
WINDOW = 48


@dataclass(frozen=True)
class Model:
    """Layers and, by name, the groups that share block tables."""

    layers: tuple[Layer, ...]
    groups: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True)
class Shape:
    """One engine: `order` of its pages in memory, tokens per page, ranks. `is_staged`: it reads through staging if it can."""

    name: str
    model: str
    is_prefill: bool
    tp: int
    page: int
    order: str
    num_pages: int = 160
    is_staged: bool = False

    def layout(self) -> EngineLayout:
        """At made-up addresses."""
        model = MODELS[self.model]
        groups = [PagedGroup(name, layers, self.page) for name, layers in model.groups.items()]
        return assemble(
            self.name, model.layers, groups, Grid(self.tp), order=self.order, num_pages=self.num_pages, null_page=None
        )


def _layers(first: int, count: int, kind: Attention | Latent | Mamba2) -> tuple[Layer, ...]:
    return tuple(Layer(f"layers.{first + number}", kind) for number in range(count))


def _model(**groups: tuple[Layer, ...]) -> Model:
    layers = tuple(layer for found in groups.values() for layer in found)
    return Model(layers, {name: tuple(layer.name for layer in found) for name, found in groups.items()})


MODELS = {
    "heads": _model(full=_layers(0, 3, Attention(4, 16, "bfloat16"))),
    "latent": _model(full=_layers(0, 3, Latent(48, "bfloat16"))),
    "hybrid": _model(
        full=_layers(0, 2, Attention(2, 16, "bfloat16")),
        window=_layers(2, 2, Attention(2, 16, "bfloat16", None, WINDOW)),
        state=_layers(4, 2, Mamba2(4, 8, 2, 8, 4, "bfloat16", "float32")),
    ),
}

SHAPES = (
    Shape("heads-p0", "heads", True, tp=2, page=16, order="NHD"),
    Shape("heads-p1", "heads", True, tp=1, page=8, order="HND", num_pages=480),
    Shape("latent-p0", "latent", True, tp=1, page=64, order="NHD"),
    Shape("hybrid-p0", "hybrid", True, tp=2, page=16, order="NHD"),
    Shape("heads-d0", "heads", False, tp=1, page=8, order="HND", num_pages=480),
    Shape("heads-d1", "heads", False, tp=4, page=32, order="NHD", is_staged=True),
    Shape("latent-d0", "latent", False, tp=2, page=16, order="NHD"),
    Shape("hybrid-d0", "hybrid", False, tp=1, page=32, order="HND"),
)


def sources_of(reader: Shape) -> tuple[Shape, ...]:
    """The engines that a decode engine reads from."""
    return tuple(shape for shape in SHAPES if shape.is_prefill and shape.model == reader.model)
