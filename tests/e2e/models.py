"""How are the tiny models that the engines run made?

Each has random weights, drawn once from a fixed seed, and lies in a folder named after a digest of its description:

1. a `TinyModel` (`tiny`, `zoo`) names a `transformers` class and the arguments of its configuration;
2. `make` builds it, fills every weight, and saves it (float32 unless the family runs in bfloat16 only);
3. beside them lies a tokenizer of single bytes; the tests send token ids, and do without it where they can.

Weights are wider than usual (standard deviation 0.1, not 0.02), so that the most likely token leads by far more than
float32 noise; a corrupted cache then shows in the tokens as well as in the log-probabilities.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e import drafts
from tests.e2e.tiny import BASE, PICTURE_TOKEN, SPECIAL, VOCABULARY, WIDTH, TinyModel
from tests.e2e.zoo import MODELS


def home() -> Path:
    """Where models are kept between runs; `KVRESHARD_E2E_HOME` overrides it."""
    default = Path(tempfile.gettempdir()) / f"kvreshard-e2e-{os.getuid()}"
    return Path(os.environ.get("KVRESHARD_E2E_HOME", default))


def folder(name: str) -> Path:
    """Where model `name` lies, or will lie."""
    return home() / "models" / f"{name}-{MODELS[name].digest}"


def make(name: str) -> Path:
    """Build model `name` unless it is there. Post-condition: its folder is complete, whoever else makes it meanwhile."""
    target, model = folder(name), MODELS[name]
    if target.exists():
        return target
    import torch
    import transformers

    target.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{name}-"))
    architecture = getattr(transformers, model.architecture)
    torch.manual_seed(model.seed)
    base = {} if model.picture_tokens else BASE
    built = architecture(architecture.config_class(**{**base, **model.config}))
    _fill(built, model.seed)
    built.to(getattr(torch, model.dtype)).save_pretrained(scratch)
    _tokenizer().save_pretrained(scratch)
    if model.picture_tokens:
        _processor(model).save_pretrained(scratch)
    if model.draft is not None:
        drafts.add_draft(model.draft, scratch)
    try:
        scratch.rename(target)
    except OSError:  # another process was faster
        shutil.rmtree(scratch)
    return target


def _tokenizer() -> Any:
    """A token per byte, for servers and people that want text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    words += [f"<{number}>" for number in range(len(words), VOCABULARY)]
    words[PICTURE_TOKEN] = "<image>"
    tokenizer = Tokenizer(models.BPE({word: number for number, word in enumerate(words)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=SPECIAL[0], bos_token=SPECIAL[1], eos_token=SPECIAL[2]
    )


def _processor(model: TinyModel) -> Any:
    """What makes pixels of a picture; a class that does without torchvision."""
    from transformers import Blip2Processor
    from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

    side = model.config["vision_config"]["image_size"]
    return Blip2Processor(
        BlipImageProcessorPil(size={"height": side, "width": side}),
        _tokenizer(),
        num_query_tokens=model.picture_tokens,
    )


def _fill(built: Any, seed: int) -> None:
    """Give values to what `transformers` leaves at zero or one, or the shapes of the heads would not be told apart.

    Left as they are: norms, and what a state model derives its decay from.
    """
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in built.named_parameters():
            kept = tensor.ndim < 2 and not name.endswith("bias")
            if kept or "dt_bias" in name or bool(tensor.std() > 0):
                continue
            tensor.normal_(0.0, WIDTH, generator=generator)
