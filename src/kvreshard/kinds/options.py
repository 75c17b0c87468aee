"""The option of vLLM that sets how a field is stored (`config/cache.py`).

| field | option |
|---|---|
| of a recurrent state | `--mamba-ssm-cache-dtype`, and where that is not given `--mamba-cache-dtype` |
| of a convolution state | `--mamba-cache-dtype` |
| with a token axis | `--kv-cache-dtype`, and where that is `auto` `--dtype` |
"""

from __future__ import annotations

from kvreshard.model.encoding_options import announce
from kvreshard.model.field import Field


@announce
def dtype_option(field: Field) -> str:
    """The options, by the field's name and axes."""
    if field.sequence is not None:
        # How quantised rows and pages of unknown inside are filled also follows from the release and the device.
        alike = ", release of vLLM and kind of device" if field.encoding.startswith(("uint8/", "opaque/")) else ""
        return f"--kv-cache-dtype (and --dtype, where that is auto){alike}"
    if field.name.endswith(".ssm"):
        return "--mamba-ssm-cache-dtype (or --mamba-cache-dtype, where that is not given)"
    return "--mamba-cache-dtype" if ".conv." in field.name else "--mamba-cache-dtype and --mamba-ssm-cache-dtype"
