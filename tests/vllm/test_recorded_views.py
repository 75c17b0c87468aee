"""The caches that the GPU kit makes on a device are those that vLLM makes."""

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from bench.gpu.record_views import CASES, FILE, as_text, record
from vllm.model_executor.layers.mamba import mamba_utils

from kvreshard.vllm.describe import paged
from kvreshard.vllm.versions import release

pytestmark = pytest.mark.vllm


def test_the_recording_is_what_vllm_makes_today(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mamba_utils, "get_conv_state_layout", mamba_utils.get_conv_state_layout)  # put back afterwards
    # 0.30's scales of packed rows are of any value, which is another encoding of the same views.
    monkeypatch.setattr(paged, "release", lambda: SimpleNamespace(minor=max(release().minor, (0, 31))))
    found = record()
    assert set(found) == set(CASES)
    assert FILE.read_text(encoding="utf-8") == as_text(found), "run: .venv-vllm/bin/python -m bench.gpu.record_views"
