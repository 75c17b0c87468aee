"""Is every model of the issue in the catalog with its sources, and does `load` take ids and paths alike?"""

import json
from pathlib import Path

import pytest

from kvreshard.catalog import MODELS, load
from kvreshard.catalog.entries import CONFIGS, geometry
from kvreshard.model import LayoutError

WANTED = (
    "llama-3.1-8b llama-3.1-70b qwen3-32b gpt-oss-120b gemma-3-27b gemma-4-12b gemma-4-26b-a4b gemma-4-31b deepseek-v2-lite "
    "deepseek-v3 deepseek-v3.2 deepseek-v4-flash kimi-k2.5-eagle3 gqa-mla-draft nemotron-3-nano-30b-a3b qwen3-next-80b-a3b "
    "qwen3.5 granite-4-h-small falcon-h1-34b jamba-1.5-mini"
).split()


def test_the_catalog_is_complete() -> None:
    assert sorted(MODELS) == sorted(WANTED)


@pytest.mark.parametrize("model", WANTED)
def test_every_entry_has_sources_and_a_geometry(model: str) -> None:
    entry = MODELS[model]
    assert entry.model
    assert entry.sources
    assert geometry(entry.load())
    assert entry.load().model_type


def test_geometry_in_one_line() -> None:
    assert geometry(load("gemma-4-26b-a4b")) == "25 x window 1024, 8 heads x 256; 5 x full, 2 heads x 512"
    assert geometry(load("kimi-k2.5-eagle3")) == "61 x latent, 1152 bytes per token; 1 x draft full, 64 heads x 128"
    assert "Mamba-1 8192 channels x 16" in geometry(load("jamba-1.5-mini"))


# Published sizes, none of them computed by this package.
@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("llama-3.1-8b", 131072),
        ("granite-4-h-small", 16384),
        ("jamba-1.5-mini", 16 * 1024),
        ("gemma-4-31b", 819200 + 10 * 4 * 512 * 2 * 2),
    ],
)
def test_bytes_per_token_agree_with_what_was_published(model: str, expected: int) -> None:
    kinds = [layer.kind for layer in load(model).layers if layer.family in ("full", "window")]
    assert sum(kind.num_kv_heads * kind.head_size * 2 * 2 for kind in kinds) == expected


def test_a_path_is_read_like_an_id(tmp_path: Path) -> None:
    config = tmp_path / "some-model" / "config.json"
    config.parent.mkdir()
    config.write_bytes((CONFIGS / "llama-3.1-8b.json").read_bytes())
    by_file, by_directory = load(str(config)), load(str(config.parent))
    assert by_file == by_directory
    assert by_file.layers == load("llama-3.1-8b").layers
    assert by_file.name == "some-model"


@pytest.mark.parametrize("given", ["config.json", ".", "../some-model"])
def test_a_model_in_the_current_folder_has_the_folders_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    folder = tmp_path / "some-model"
    folder.mkdir()
    (folder / "config.json").write_bytes((CONFIGS / "llama-3.1-8b.json").read_bytes())
    monkeypatch.chdir(folder)
    assert load(given).name == "some-model"
    (folder / "config.json").write_text('{"model_type": 3}')
    with pytest.raises(LayoutError, match="config of 'some-model', field 'model_type'"):
        load(given)


QUANTISED = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8"}}


@pytest.mark.parametrize(
    ("own", "name", "declared"),
    [({}, "config.json", "fp8_e4m3"), ({"quantization_config": {"quant_method": "fp8"}}, "config.json", "auto"), ({}, "other.json", "auto")],
)  # fmt: skip
def test_a_directory_may_declare_its_caches_in_a_file_beside(
    tmp_path: Path, own: dict[str, object], name: str, declared: str
) -> None:
    (tmp_path / name).write_text(json.dumps({**json.loads((CONFIGS / "llama-3.1-8b.json").read_text()), **own}))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(QUANTISED))
    assert load(str(tmp_path / name)).declared == declared
    (tmp_path / "hf_quant_config.json").write_text("{")
    if declared != "auto":
        with pytest.raises(LayoutError, match=r"hf_quant_config\.json': is not JSON"):
            load(str(tmp_path))


def test_any_model_may_come_with_a_draft() -> None:
    model = load("llama-3.1-8b", draft="deepseek-v2-lite")
    drafted = [layer for layer in model.layers if layer.optional]
    assert [layer.name for layer in drafted][:2] == ["draft.0.attn", "draft.1.attn"]
    assert len(drafted) == 27


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "holds a list; it must be a JSON object"),
        ("{}", "field 'model_type': is missing"),
        (json.dumps({"model_type": "llama"}), "field 'num_hidden_layers': is missing"),
    ],
)
def test_a_bad_file_is_one_clear_error(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(LayoutError, match=message):
        load(str(path))


def test_an_unknown_name_is_answered_with_the_nearest(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match=r"model 'lama-3\.1-8b'.*did you mean 'llama-3\.1-8b'\?"):
        load("lama-3.1-8b")
    with pytest.raises(LayoutError, match="nor is there a file"):
        load(str(tmp_path))
