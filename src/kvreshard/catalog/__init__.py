"""The geometry of real models: read from a config.json, and laid out for an engine as a person writes it.

>>> layout = describe(load("llama-3.1-8b"), parse_engine("tp=2,order=HND"), "prefill")
>>> layout.groups[0].name, layout.groups[0].tokens_per_page, len(layout.ranks)
('full', 16, 2)
"""

from kvreshard.catalog.advice import assumed, warnings
from kvreshard.catalog.engine import describe
from kvreshard.catalog.entries import MODELS, Entry, load
from kvreshard.catalog.layers import Model, ModelLayer, as_draft
from kvreshard.catalog.read import read_model
from kvreshard.catalog.shrink import fit_stages, shrink
from kvreshard.catalog.spec import EngineSpec, parse_engine

__all__ = [
    "MODELS",
    "EngineSpec",
    "Entry",
    "Model",
    "ModelLayer",
    "as_draft",
    "assumed",
    "describe",
    "fit_stages",
    "load",
    "parse_engine",
    "read_model",
    "shrink",
    "warnings",
]
