"""Every option that NixlConnector has in the vLLM at hand, read from its source by text: `docs/reference/options.md` has a row for it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import vllm

from kvreshard.vllm.options import BACKENDS, OF_NIXL_CONNECTOR, Options, read_options

pytestmark = pytest.mark.vllm
PAGE = Path(__file__).parents[2] / "docs/reference/options.md"
ROOT = Path(vllm.__file__).parent


def read(place: str) -> str:
    """The text of one file of vLLM, or of all files of a folder."""
    path = ROOT / place
    return "\n".join(one.read_text(encoding="utf-8") for one in sorted(path.rglob("*.py") if path.is_dir() else [path]))


def nixl_connector() -> str:
    return read("distributed/kv_transfer/kv_connector/v1/nixl")


def extra_options() -> set[str]:
    """Names in `kv_connector_extra_config`."""
    return set(re.findall(r"get_from_extra_config\(\s*[\"'](\w+)[\"']", nixl_connector()))


def config_fields() -> set[str]:
    """Fields of KVTransferConfig."""
    body = read("config/kv_transfer.py").partition("class KVTransferConfig:")[2].partition("    def ")[0]
    return set(re.findall(r"^    (\w+): ", body, re.MULTILINE))


def variables() -> set[str]:
    """Environment variables, also those that it sets."""
    text = nixl_connector() + read("distributed/nixl_utils.py")
    found = set(re.findall(r"envs\.(VLLM_\w+)", text)) | set(re.findall(r"os\.environ\[[\"'](\w+)[\"']\]", text))
    return found | set(re.findall(r"\b(VLLM_NIXL_\w+)", read("envs.py")))


def first_columns(heading: str) -> set[str]:
    """The names in the first column of the table below a heading."""
    table = PAGE.read_text(encoding="utf-8").partition(heading)[2].partition("\n\n## ")[0]
    rows = [line.split(" | ")[0] for line in table.splitlines() if line.startswith("| `")]
    return set(re.findall(r"`(\w+)`", " ".join(rows)))


def test_every_option_is_known_and_on_the_page() -> None:
    extra = extra_options()
    assert len(extra) >= 9
    ours = {*Options.__struct_fields__, *OF_NIXL_CONNECTOR, BACKENDS}
    assert extra <= ours, "a new option of NixlConnector: map it or refuse it in options.py, and say so on the page"
    listed = first_columns("## If you come from NixlConnector")
    assert extra <= listed
    assert config_fields() <= listed
    assert variables() <= listed
    assert len(config_fields()) >= 8
    assert len(variables()) >= 3


def test_options_are_read_in_no_other_way() -> None:
    """A second way to read them would be missed by the test above."""
    rest = re.sub(r"get_from_extra_config\(", "", nixl_connector())
    rest = rest.replace('"kv_connector_extra_config": \'', "")  # in the text of an error
    assert "extra_config" not in rest


def test_the_defaults_of_nixl_connector_are_accepted_where_they_ask_for_what_is_done_anyway() -> None:
    for name in sorted(extra_options() & set(Options.__struct_fields__)):
        default = re.search(rf"get_from_extra_config\(\s*\"{name}\",\s*([\w.]+)", nixl_connector())
        assert default is not None
        read_options({name: ast.literal_eval(default[1])})
    assert (
        read_options({"backends": ["UCX"], "enforce_handshake_compat": True, "bidirectional_kv_xfer": False})
        == Options()
    )
