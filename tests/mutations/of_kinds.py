"""In which ways is a cache kind broken to see whether the tests notice? See `mutant`."""

from mutant import Mutant

MUTANTS = [
    Mutant("V on top of K", "kinds/attention.py", '(views["kv"], k_bytes)]', '(views["kv"], 0)]'),
    Mutant(
        "V before K",
        "kinds/attention.py",
        'return ("kv", token, head, channel, 0), ("kv", token, head, channel, view.slot_step)',
        'return ("kv", token, head, channel, view.slot_step), ("kv", token, head, channel, 0)',
    ),
    Mutant(
        "the V plane starts where a K of V's width would end",
        "kinds/attention.py",
        "             self._channels(self.value_size), states * k_bytes),\n        )  # fmt: skip\n\n    def _planes_transposed",
        "             self._channels(self.value_size), states * v_bytes),\n        )  # fmt: skip\n\n    def _planes_transposed",
    ),
    Mutant(
        "tiles: K's channels in fours",
        "kinds/attention.py",
        "self.head_size, Digit(2, 0, element), Digit(self.head_size // 2, 0, 2 * TILE * element)",
        "self.head_size, Digit(2, 0, element), Digit(self.head_size // 2, 0, 2 * element)",
    ),
    Mutant(
        "tiles: V's pairs of tokens and channels swapped",
        "kinds/attention.py",
        '"token", place.tokens(), Digit(2, 0, element), Digit(states // 2, 0, 2 * TILE * element)',
        '"token", place.tokens(), Digit(2, 0, 2 * element), Digit(states // 2, 0, 2 * TILE * element)',
    ),
    Mutant(
        "heads by context-parallel rank",
        "kinds/place.py",
        "self.tp_rank // self.dcp_size)",
        "self.tp_rank % (self.tp_size // self.dcp_size))",
    ),
    Mutant(
        "context-parallel ranks far apart",
        "kinds/place.py",
        "return self.tp_rank % self.dcp_size",
        "return self.tp_rank // (self.tp_size // self.dcp_size)",
    ),
    Mutant("interleave is ignored", "kinds/place.py", "run = self.interleave // tokens_per_state", "run = 1"),
    Mutant(
        "rows of one band on those of the next",
        "kinds/state.py",
        "        row += band.num_rows\n",
        "        row += 1\n",
    ),
    Mutant(
        "scratch columns are not skipped",
        "kinds/state.py",
        "dtype_bytes(tensor.dtype), tensor.live_taps + tensor.scratch_taps",
        "dtype_bytes(tensor.dtype), tensor.live_taps",
    ),
    Mutant(
        "B and C swapped",
        "kinds/mamba.py",
        'Band("conv.B", (group, state)),\n            Band("conv.C", (group, state)),',
        'Band("conv.C", (group, state)),\n            Band("conv.B", (group, state)),',
    ),
    Mutant(
        "q and k swapped",
        "kinds/linear.py",
        'Band("conv.q", (key_head, key)),\n            Band("conv.k", (key_head, key)),',
        'Band("conv.k", (key_head, key)),\n            Band("conv.q", (key_head, key)),',
    ),
    Mutant(
        "all groups on every rank",
        "kinds/mamba.py",
        'Part("group", self.num_groups, place.part(self.num_groups))',
        'Part("group", self.num_groups, whole(self.num_groups))',
    ),
    Mutant(
        "Mamba-1 gets speculative columns",
        "kinds/mamba.py",
        "self.conv_kernel - 1, 0, self.conv_dtype)",
        "self.conv_kernel - 1, 1, self.conv_dtype)",
    ),
    Mutant(
        "a ring forgets what speculation adds",
        "kinds/ring.py",
        "self.live_tokens // self.tokens_per_state + style.speculative_tokens",
        "self.live_tokens // self.tokens_per_state",
    ),
    Mutant("parts of a ring on top of one another", "kinds/ring.py", "slot * view.slot_step", "0"),
    Mutant(
        "a convolution that is whole on every rank is split",
        "kinds/linear.py",
        "whole(self.num_channels) if self.is_replicated else",
        "whole(self.num_channels) if False else",
    ),
    Mutant(
        "scales behind the whole page",
        "kinds/rows.py",
        "(self.scale_name, self.scale_bytes, states * self.row_bytes)",
        "(self.scale_name, self.scale_bytes, shape.states * self.row_bytes)",
    ),
    Mutant(
        "a latent per token instead of per state",
        "kinds/mla.py",
        '(Axis("token", None, self.tokens_per_state), Axis("channel", extent))',
        '(Axis("token", None, 1), Axis("channel", extent))',
    ),
    Mutant(
        "the stride forgets the padding",
        "kinds/assemble.py",
        "            step = max(step, padded)\n",
        "            step = max(step, 0)\n",
    ),
    Mutant(
        "slots of kernel blocks as far apart as those of pages",
        "kinds/assemble.py",
        "slot_step = kernel * shape.cell_bytes if head_major else tensor.slot_step",
        "slot_step = tensor.slot_step",
    ),
    Mutant(
        "any rank's opaque page will do",
        "kinds/opaque.py",
        "Interval(place.tp_rank, place.tp_rank + 1)",
        "Interval(0, 1)",
    ),
]
