"""vLLM and torch warn about themselves when they are imported; what our own code warns about still fails a test."""

import importlib.util
import warnings

if importlib.util.find_spec("vllm") is not None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm.v1.core.kv_cache_manager
        import vllm.v1.request  # noqa: F401
