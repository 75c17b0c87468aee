"""Do the rooms of the package hold, and would this test notice if one did not?

Each rule is a function from a `Source` to complaints. Every rule is run over the whole package, and is also fed sources
that break it (`BROKEN`) and sources that come close without breaking it (`FINE`), so a rule that stopped working fails
here too. Why the rooms stand in this order: `docs/structure.md` and `docs/design/0001`.
"""

import ast
import graphlib
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "kvreshard"
SRC = ROOT / "src" / PACKAGE

# A room imports from itself and from rooms to its left.
ROOMS = ("model", "kinds", "plan", "transport", "session", "tools", "vllm", "catalog", "testing", "cli")
# Narrower than the order: the planner sees shards, never what kind of cache they came from.
NEVER = {("plan", "kinds")}

# Module -> where it may be imported: rooms, or files.
FENCED = {
    "nixl": ("transport/nixl_agent.py",),
    "nixl_cu12": ("transport/nixl_agent.py",),
    "nixl_cu13": ("transport/nixl_agent.py",),
    "vllm": ("vllm/",),
    "torch": ("vllm/", "transport/device.py", "transport/device_kernel.py"),
    "triton": ("transport/device_kernel.py",),
    "hypothesis": (),
    "pytest": ("testing/",),
}
UNPICKLERS = {
    "pickle",
    "_pickle",
    "cPickle",
    "pickle5",
    "cloudpickle",
    "dill",
    "marshal",
    "shelve",
    "joblib",
    "jsonpickle",
}
# NIXL's two pickle descriptor lists, ZeroMQ's pickle a message; the others unpickle a file.
PICKLING_CALLS = {
    **dict.fromkeys(("deserialize_descs", "get_serialized_descs"), "of NIXL"),
    **dict.fromkeys(("recv_pyobj", "send_pyobj", "recv_serialized"), "of ZeroMQ"),
    "read_pickle": "of pandas",
}

# Rooms that know boxes, digits and addresses, and no model.
MODEL_FREE = ("model", "plan", "transport", "session", "tools")
MODEL_WORDS = frozenset(
    "mla mha mqa gqa mamba ssm gdn dsa mtp rope deltanet "
    "gemma deepseek llama qwen kimi nemotron granite falcon jamba bamba eagle gpt mistral mixtral glm".split()
)

VAGUE_NAMES = {"util", "utils", "helper", "helpers", "misc"}
MAX_LINES = 400
MIN_MODULES = 20


@dataclass(frozen=True, slots=True)
class Source:
    """One file of the package: its path below `src/kvreshard`, with slashes, and its text."""

    path: str
    text: str

    @property
    def room(self) -> str:
        """The room, or the empty string for a file that lies beside the rooms. `python -m` wants its part of cli/ there."""
        if self.path == "__main__.py":
            return "cli"
        return self.path.split("/")[0] if "/" in self.path else ""

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)


def imported_modules(source: Source) -> Iterator[tuple[int, str]]:
    """Line and dotted name of all that is imported, at any depth.

    Relative names are resolved, and dynamic imports of a constant count. `from a import b` yields `a.b`, since `b` may
    be a module.
    """
    package = [PACKAGE, *source.path.split("/")[:-1]]
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call) and called_name(node) in {"import_module", "__import__"}:
            constants = [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant)]
            yield from ((node.lineno, name) for name in constants if isinstance(name, str))


def called_name(call: ast.Call) -> str:
    """The last part of what is called: `print` for `print()`, `load` for `np.load()`."""
    if isinstance(call.func, ast.Attribute):
        return call.func.attr
    return call.func.id if isinstance(call.func, ast.Name) else ""


def for_type_checkers(source: Source) -> Iterator[ast.If]:
    """The blocks under `if TYPE_CHECKING:` of a module."""
    for node in source.tree.body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            yield node


def imports_go_up_the_list(source: Source) -> Iterator[str]:
    if source.path != "__init__.py" and source.room not in ROOMS:
        yield f"{source.path}: is in no room; the rooms are {', '.join(ROOMS)}"
        return
    shown = {node.lineno for block in for_type_checkers(source) for node in ast.walk(block) if hasattr(node, "lineno")}
    for line, name in imported_modules(source):
        if not source.room and line in shown:
            continue  # what the bare package loads at first use, written out for type checkers
        parts = name.split(".")
        target = parts[1] if parts[0] == PACKAGE and len(parts) > 1 else ""
        if target not in ROOMS:
            continue
        if not source.room:
            yield f"{source.path}:{line}: imports {target}/; importing the bare package must not import a room"
        elif ROOMS.index(target) > ROOMS.index(source.room) or (source.room, target) in NEVER:
            yield f"{source.path}:{line}: {source.room}/ imports {target}/; docs/structure.md says which way imports go"


def outside_packages_stay_in_their_place(source: Source) -> Iterator[str]:
    for line, name in imported_modules(source):
        if name.split(".")[0] not in FENCED:
            continue
        fences = FENCED[name.split(".")[0]]
        inside = (source.path.startswith(fence) if fence.endswith("/") else source.path == fence for fence in fences)
        if not any(inside):
            yield f"{source.path}:{line}: imports {name}, which is for {' and '.join(fences) or 'tests'} only"


def nothing_is_unpickled(source: Source) -> Iterator[str]:
    for line, name in imported_modules(source):
        if name.split(".")[0] in UNPICKLERS:
            yield f"{source.path}:{line}: imports {name}; data from a peer is decoded by msgspec, never unpickled"
    for node in ast.walk(source.tree):
        if not isinstance(node, ast.Call):
            continue
        if called_name(node) in PICKLING_CALLS:
            whose = PICKLING_CALLS[called_name(node)]
            yield f"{source.path}:{node.lineno}: {called_name(node)} {whose} pickles; a peer's bytes are decoded by msgspec"
        if (
            called_name(node) == "load"
            and isinstance(node.func, ast.Attribute)
            and ast.unparse(node.func.value) == "torch"
        ):
            yield f"{source.path}:{node.lineno}: torch.load unpickles; data from a peer is decoded by msgspec"
        for keyword in node.keywords:
            if keyword.arg == "allow_pickle" and not (
                isinstance(keyword.value, ast.Constant) and keyword.value.value is False
            ):
                yield f"{source.path}:{node.lineno}: allow_pickle"


def only_cli_prints(source: Source) -> Iterator[str]:
    if source.room == "cli":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "print":
            yield f"{source.path}:{node.lineno}: prints; only cli/ talks to a terminal, other rooms log or return"


def words(text: str) -> Iterator[str]:
    """The words of `text`, small, with identifiers also taken apart: `MLASpec`, `mla_spec` and `mla2` all hold `mla`."""
    for whole in re.findall(r"[A-Za-z]+", text):
        yield whole.lower()
        yield from (part.lower() for part in re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", whole))


def no_model_words(source: Source) -> Iterator[str]:
    if source.room not in MODEL_FREE:
        return
    for number, line in enumerate([source.path, *source.text.splitlines()]):
        for word in sorted(MODEL_WORDS.intersection(words(line))):
            yield f"{source.path}:{number}: says '{word}'; model vocabulary is for kinds/, catalog/ and vllm/"


def files_are_small_and_named(source: Source) -> Iterator[str]:
    if VAGUE_NAMES.intersection(re.split(r"[/._]", source.path)):
        yield f"{source.path}: the name does not say what is inside"
    if (lines := len(source.text.splitlines())) > MAX_LINES:
        yield f"{source.path}: {lines} lines, more than {MAX_LINES}; which noun is missing?"


def modules_say_what_they_are(source: Source) -> Iterator[str]:
    if not (ast.get_docstring(source.tree) or "").strip():
        yield f"{source.path}: has no docstring; a module's docstring is the question that it answers"


def loggers_escape_what_they_quote(source: Source) -> Iterator[str]:
    """A module's own logger comes from `model.logs`; those of other packages may be set up."""
    if source.path == "model/logs.py":
        return
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Call) and called_name(node).endswith("getLogger"):
            names = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if names not in (["vllm"], ["nixl"], ["kvreshard"]):
                yield f"{source.path}:{node.lineno}: logging.getLogger; take get_logger of kvreshard.model.logs, which escapes what is quoted"
        if is_log_call(node) and isinstance(node.args[0], ast.JoinedStr):
            yield f"{source.path}:{node.lineno}: a log line as an f-string, whose parts cannot be escaped; give them as arguments"


def is_log_call(node: ast.AST) -> TypeGuard[ast.Call]:
    """Whether a node is `logger.warning(...)` or the like."""
    function = node.func if isinstance(node, ast.Call) and node.args else None
    is_method = isinstance(function, ast.Attribute) and function.attr in {
        "info",
        "warning",
        "error",
        "exception",
        "debug",
    }
    return is_method and isinstance(function.value, ast.Name) and function.value.id == "logger"


Rule = Callable[[Source], Iterator[str]]
RULES: list[Rule] = [
    imports_go_up_the_list,
    outside_packages_stay_in_their_place,
    nothing_is_unpickled,
    only_cli_prints,
    no_model_words,
    files_are_small_and_named,
    modules_say_what_they_are,
    loggers_escape_what_they_quote,
]


def package_sources() -> list[Source]:
    """All modules of the package as they lie in the checkout."""
    paths = sorted(SRC.rglob("*.py"))
    return [Source(path.relative_to(SRC).as_posix(), path.read_text(encoding="utf-8")) for path in paths]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_package(rule: Rule) -> None:
    complaints = [complaint for source in package_sources() for complaint in rule(source)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_the_package_was_found() -> None:
    sources = package_sources()
    assert len(sources) >= MIN_MODULES, [source.path for source in sources]
    assert {source.room for source in sources} >= {"model", "kinds", "plan", "transport", "testing", "cli"}


def circle_of_imports(sources: Iterable[Source]) -> list[str]:
    """Files that import one another in a circle, the first one again at the end; empty if there is none. `__init__` files only re-export."""
    files = {
        source.path.removesuffix(".py").replace("/", "."): source for source in sources if "__init__" not in source.path
    }
    imports: dict[str, set[str]] = {}
    for module, source in files.items():
        names = (name.removeprefix(f"{PACKAGE}.") for _, name in imported_modules(source))
        imports[module] = {found for name in names for found in (name, name.rpartition(".")[0]) if found in files}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return [str(module) for module in error.args[1]]
    return []


def test_no_files_import_one_another_in_a_circle() -> None:
    assert circle_of_imports(package_sources()) == []


@pytest.mark.parametrize(
    "text",
    ["from kvreshard.plan.b import B", "def f():\n    from . import b", "if TYPE_CHECKING:\n    from .b import B"],
)
def test_a_circle_of_imports_is_noticed(text: str) -> None:
    back = Source("plan/b.py", "import kvreshard.plan.a")
    assert circle_of_imports([Source("plan/a.py", text), back]) in (
        ["plan.a", "plan.b", "plan.a"],
        ["plan.b", "plan.a", "plan.b"],
    )
    assert circle_of_imports([Source("plan/a.py", "import numpy"), back]) == []


def structure_entries(text: str) -> list[str]:
    """The rooms that a page lists, in its order: lines like "- `plan/`: a sentence."."""
    return re.findall(r"^- `(\w+)/`: \S.*\.$", text, flags=re.MULTILINE)


def test_each_room_has_its_sentence_in_the_structure_page() -> None:
    assert structure_entries((ROOT / "docs" / "structure.md").read_text(encoding="utf-8")) == list(ROOMS)
    assert structure_entries("- `plan/`: pure.\n- `cli/`\n- model/: nouns.\n") == ["plan"]


BROKEN: list[tuple[Rule, str, str]] = [
    (imports_go_up_the_list, "model/a.py", "import kvreshard.plan.route"),
    (imports_go_up_the_list, "model/a.py", "from kvreshard import plan"),
    (imports_go_up_the_list, "model/a.py", "from ..plan import route"),
    (imports_go_up_the_list, "model/a.py", "from .. import plan"),
    (imports_go_up_the_list, "model/deep/a.py", "from ...plan.route import Route"),
    (imports_go_up_the_list, "model/__init__.py", "from ..kinds import attention"),
    (imports_go_up_the_list, "plan/a.py", "from kvreshard.kinds import attention"),
    (imports_go_up_the_list, "plan/a.py", "def f():\n    import kvreshard.testing.oracle"),
    (imports_go_up_the_list, "plan/a.py", "import typing\nif typing.TYPE_CHECKING:\n    from kvreshard import cli"),
    (imports_go_up_the_list, "plan/a.py", "importlib.import_module('kvreshard.cli')"),
    (imports_go_up_the_list, "testing/a.py", "import kvreshard.cli"),
    (imports_go_up_the_list, "__init__.py", "from kvreshard.plan import compile"),
    (imports_go_up_the_list, "server/a.py", ""),
    (imports_go_up_the_list, "loose.py", ""),
    (imports_go_up_the_list, "plan/__main__.py", "import kvreshard.cli"),
    (outside_packages_stay_in_their_place, "transport/memory.py", "import nixl"),
    (outside_packages_stay_in_their_place, "transport/nixl_owner.py", "from nixl._api import nixl_agent"),
    (outside_packages_stay_in_their_place, "cli/doctor.py", "def f():\n    from nixl import nixl_agent"),
    (outside_packages_stay_in_their_place, "cli/doctor.py", "__import__('nixl')"),
    (outside_packages_stay_in_their_place, "transport/nixl.py", "def f():\n    import torch"),
    (outside_packages_stay_in_their_place, "transport/device.py", "import vllm"),
    (outside_packages_stay_in_their_place, "kinds/a.py", "from vllm.v1 import kv_cache_interface"),
    (outside_packages_stay_in_their_place, "cli/verify.py", "import hypothesis.strategies as st"),
    (nothing_is_unpickled, "model/wire.py", "import pickle"),
    (nothing_is_unpickled, "model/wire.py", "from pickle import loads"),
    (nothing_is_unpickled, "cli/a.py", "import numpy as np\nnp.load('x', allow_pickle=True)"),
    (nothing_is_unpickled, "transport/nixl.py", "agent.deserialize_descs(b'')"),
    (nothing_is_unpickled, "transport/nixl.py", "self._agent.get_serialized_descs(descs)"),
    (nothing_is_unpickled, "session/a.py", "socket.recv_pyobj()"),
    (nothing_is_unpickled, "vllm/a.py", "import torch\ntorch.load('x')"),
    (only_cli_prints, "testing/contract.py", "def f():\n    print('hello')"),
    (no_model_words, "plan/a.py", "# as for MLA"),
    (no_model_words, "plan/a.py", "is_mla = True"),
    (no_model_words, "plan/a.py", "class MLASpec: ..."),
    (no_model_words, "plan/a.py", "class GemmaPlan: ..."),
    (no_model_words, "model/a.py", "mamba2_pages = 3"),
    (no_model_words, "session/a.py", "model = 'DeepSeek-V3'.lower()"),
    (no_model_words, "transport/gqa.py", ""),
    (files_are_small_and_named, "plan/utils.py", ""),
    (files_are_small_and_named, "plan/page_helpers.py", ""),
    (files_are_small_and_named, "misc/a.py", ""),
    (files_are_small_and_named, "plan/a.py", "x = 1\n" * (MAX_LINES + 1)),
    (modules_say_what_they_are, "plan/a.py", "x = 1"),
    (modules_say_what_they_are, "plan/a.py", '"""   """'),
    (modules_say_what_they_are, "plan/__init__.py", ""),
    (loggers_escape_what_they_quote, "session/a.py", "import logging\nlogger = logging.getLogger(__name__)"),
    (loggers_escape_what_they_quote, "session/a.py", "from logging import getLogger\nlogger = getLogger('mine')"),
    (loggers_escape_what_they_quote, "vllm/a.py", "logger.warning(f'request {name}')"),
]

FINE: list[tuple[Rule, str, str]] = [
    (imports_go_up_the_list, "plan/a.py", "from kvreshard.model import Shard\nfrom .route import Route\nimport numpy"),
    (imports_go_up_the_list, "plan/deep/a.py", "from .. import route\nfrom ...model import wire"),
    (imports_go_up_the_list, "cli/verify.py", "from kvreshard.testing.oracle import Oracle"),
    (imports_go_up_the_list, "model/a.py", "from kvreshard import __version__"),
    (imports_go_up_the_list, "__init__.py", "__version__ = '1'"),
    (imports_go_up_the_list, "__init__.py", "if TYPE_CHECKING:\n    from kvreshard.plan import bind as bind"),
    (outside_packages_stay_in_their_place, "transport/nixl_agent.py", "from nixl._api import nixl_agent"),
    (outside_packages_stay_in_their_place, "vllm/worker.py", "import torch, vllm"),
    (outside_packages_stay_in_their_place, "transport/device.py", "import torch"),
    (outside_packages_stay_in_their_place, "cli/a.py", "from kvreshard.transport.nixl import NixlTransport"),
    (outside_packages_stay_in_their_place, "testing/contract.py", "import pytest"),
    (nothing_is_unpickled, "cli/a.py", "np.load('x', allow_pickle=False)\n# no pickle"),
    (nothing_is_unpickled, "cli/a.py", "json.load(file)\nentry.load()"),
    (only_cli_prints, "cli/a.py", "print('hello')"),
    (only_cli_prints, "plan/a.py", "table.print()\nfingerprint()"),
    (no_model_words, "plan/a.py", "formula = small_lamb = 'islamabad'"),
    (no_model_words, "kinds/mla.py", "class MLASpec: ..."),
    (files_are_small_and_named, "plan/a.py", "x = 1\n" * MAX_LINES),
    (modules_say_what_they_are, "plan/a.py", '"""Which source rank holds a byte?"""'),
    (loggers_escape_what_they_quote, "session/a.py", "logger = get_logger(__name__)\nlogger.info('request %s', name)"),
    (loggers_escape_what_they_quote, "vllm/a.py", "logging.getLogger('vllm').setLevel(1)"),
]


@pytest.mark.parametrize(("rule", "path", "text"), BROKEN)
def test_a_broken_source_is_noticed(rule: Rule, path: str, text: str) -> None:
    complaints = list(rule(Source(path, text)))
    assert complaints
    assert all(complaint.startswith(path) for complaint in complaints)


@pytest.mark.parametrize(("rule", "path", "text"), FINE)
def test_a_fine_source_is_left_alone(rule: Rule, path: str, text: str) -> None:
    assert list(rule(Source(path, text))) == []


def test_every_rule_is_tried_both_ways() -> None:
    assert {rule for rule, _, _ in BROKEN} == set(RULES)
    assert {rule for rule, _, _ in FINE} == set(RULES)
