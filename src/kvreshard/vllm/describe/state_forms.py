"""Forms of recurrent states: one row for each, with its sizes, its kind and its shapes on a rank."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from kvreshard.kinds import GatedDelta, Kind, LinearState, Mamba1, Mamba2, ShortConv

Sizes = Mapping[str, int]
Shapes = tuple[tuple[int, ...], ...]
Held = Callable[[str], int]
"""How much of a size this rank holds, by the size's name."""


@dataclass(frozen=True, slots=True)
class StateForm:
    """`sizes`: the attributes of vLLM's layer that hold the sizes of the whole model. The functions take these sizes.

    `make`: the kind, with the dtypes of its tensors. `shapes`: on a rank, without the convolution. `channels`, `taps`: of the convolution
    on a rank, without the columns that speculation adds; None where there is no convolution. `is_replicated`: every rank holds all of it.
    `may_speculate`: the convolution may have columns for speculation.
    """

    sizes: tuple[str, ...]
    make: Callable[[Sizes, list[str]], Kind]
    shapes: Callable[[Sizes, Held], Shapes] = lambda _sizes, _held: ()
    channels: Callable[[Sizes, Held], int] | None = None
    taps: Callable[[Sizes], int] = lambda sizes: sizes["conv_kernel_size"] - 1
    is_replicated: bool = False
    may_speculate: bool = True


FORMS: Mapping[str, StateForm] = {
    "mamba1": StateForm(
        ("intermediate_size", "ssm_state_size", "conv_kernel_size"),
        make=lambda s, d: Mamba1(s["intermediate_size"], s["ssm_state_size"], s["conv_kernel_size"], d[0], d[1]),
        shapes=lambda s, held: ((held("intermediate_size"), s["ssm_state_size"]),),
        channels=lambda s, held: held("intermediate_size"),
        may_speculate=False,
    ),
    "mamba2": StateForm(
        ("num_heads", "head_dim", "n_groups", "ssm_state_size", "conv_kernel_size"),
        make=lambda s, d: Mamba2(
            s["num_heads"], s["head_dim"], s["n_groups"], s["ssm_state_size"], s["conv_kernel_size"], d[0], d[1]
        ),
        shapes=lambda s, held: ((held("num_heads"), s["head_dim"], s["ssm_state_size"]),),
        channels=lambda s, held: held("num_heads") * s["head_dim"] + 2 * held("n_groups") * s["ssm_state_size"],
    ),
    "gated-delta": StateForm(
        ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim", "conv_kernel_size"),
        make=lambda s, d: GatedDelta(
            s["num_k_heads"], s["num_v_heads"], s["head_k_dim"], s["head_v_dim"], s["conv_kernel_size"], d[0], d[1]
        ),
        shapes=lambda s, held: ((held("num_v_heads"), s["head_v_dim"], s["head_k_dim"]),),
        channels=lambda s, held: 2 * held("num_k_heads") * s["head_k_dim"] + held("num_v_heads") * s["head_v_dim"],
    ),
    "kimi-delta": StateForm(
        ("num_heads", "head_dim", "conv_size"),
        make=lambda s, d: GatedDelta(
            s["num_heads"], s["num_heads"], s["head_dim"], s["head_dim"], s["conv_size"], d[0], d[1]
        ),
        shapes=lambda s, held: ((held("num_heads"), s["head_dim"], s["head_dim"]),),
        channels=lambda s, held: 3 * held("num_heads") * s["head_dim"],
        taps=lambda s: s["conv_size"] - 1,
    ),
    "short-conv": StateForm(
        ("conv_dim", "L_cache"),
        make=lambda s, d: ShortConv(s["conv_dim"], s["L_cache"], d[0]),
        channels=lambda s, held: held("conv_dim"),
        taps=lambda s: s["L_cache"] - 1,
    ),
    "position-conv": StateForm(
        ("hc_hidden_size", "conv_state_len"),
        make=lambda s, d: ShortConv(s["hc_hidden_size"], s["conv_state_len"] + 1, d[0], is_replicated=True),
        channels=lambda s, _held: s["hc_hidden_size"],
        taps=lambda s: s["conv_state_len"],
        is_replicated=True,
    ),
    "linear": StateForm(
        ("num_heads", "head_dim"),
        make=lambda s, d: LinearState(s["num_heads"], s["head_dim"], d[0]),
        shapes=lambda s, held: ((held("num_heads"), s["head_dim"], s["head_dim"]),),
    ),
}
