"""Does every example in a docstring of the package still print what it says?"""

import doctest
import importlib
import importlib.util
from pathlib import Path

import pytest

import kvreshard

SRC = Path(kvreshard.__file__).parent
WITH_EXAMPLES = sorted(path for path in SRC.rglob("*.py") if ">>> " in path.read_text(encoding="utf-8"))


def module_name(path: Path) -> str:
    """The dotted name under which `path`, a file of the package, is imported."""
    parts = path.relative_to(SRC.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@pytest.mark.parametrize("path", WITH_EXAMPLES, ids=module_name)
def test_examples(path: Path) -> None:
    failed, tried = doctest.testmod(importlib.import_module(module_name(path)))
    assert tried > 0, "the examples are somewhere that doctest does not look"
    assert failed == 0
