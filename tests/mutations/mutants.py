"""In which ways is the code broken to see whether the tests notice?

Each mutant replaces one text that is found exactly once in one file. A mutant that no test can tell from the original is
not a mutant; replace it by one that matters.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """`old`, found exactly once in `src/kvreshard/<path>`, becomes `new`."""

    name: str
    path: str
    old: str
    new: str


MODEL = [
    Mutant(
        "a split forgets the remainder",
        "model/ownership.py",
        "return Interval(low, (index + 1) * extent // parts)",
        "return Interval(low, low + extent // parts)",
    ),
    Mutant(
        "more ranks than heads: the head above",
        "model/ownership.py",
        "        return Interval(low, low + 1)\n",
        "        return Interval(min(low + 1, extent - 1), min(low + 1, extent - 1) + 1)\n",
    ),
    Mutant(
        "cyclic: the local index forgets the start",
        "model/ownership.py",
        "return lap * self.run + (coordinates - lap * self.step - self.start)",
        "return lap * self.run + (coordinates - lap * self.step) % self.run",
    ),
    Mutant(
        "cyclic: the global index forgets the start",
        "model/ownership.py",
        "return lap * self.step + self.start + phase",
        "return lap * self.step + phase",
    ),
    Mutant(
        "cyclic: the count forgets the start",
        "model/ownership.py",
        "min(max(0, phase - self.start), self.run)",
        "min(phase, self.run)",
    ),
    Mutant(
        "cyclic: runs have no end",
        "model/ownership.py",
        "ends = np.concatenate([laps + self.start, laps + self.start + self.run])",
        "ends = laps + self.start",
    ),
    Mutant(
        "an interval has no end",
        "model/ownership.py",
        "ends = [self.start] if self.stop is None else [self.start, self.stop]",
        "ends = [self.start]",
    ),
    Mutant(
        "digits are merged over padding",
        "model/address.py",
        "continues_bytes = digit.byte_step == last.byte_step * last.extent",
        "continues_bytes = digit.byte_step >= last.byte_step * last.extent",
    ),
    Mutant(
        "a ring is taken for a sequence",
        "model/address.py",
        "        if self.digits[-1].extent is not None or self.digits[-1].page_step:\n            return None\n",
        "        return None\n",
    ),
    Mutant(
        "tokens per index are ignored",
        "model/field.py",
        "return start_token // self.tokens_per_index, stop // self.tokens_per_index",
        "return start_token, stop",
    ),
    Mutant(
        "cells that share bytes are let through",
        "model/layout_check.py",
        "int(np.diff(starts).min()) < run_bytes",
        "int(np.diff(starts).min()) < 0",
    ),
    Mutant(
        "cells outside their slab are let through",
        "model/layout_check.py",
        "((place < 0) | (stops > slabs[np.maximum(place, 0), 1])).any(axis=1)",
        "(place < 0).any(axis=1)",
    ),
    Mutant(
        "a later version is read",
        "model/form.py",
        "if not 1 <= version <= self.version:",
        "if not 1 <= version:",
    ),
    Mutant(
        "an interval may be empty",
        "model/tables.py",
        "if start < end or stop <= start:",
        "if start < end or stop < start:",
    ),
]

KINDS = [
    Mutant("V on top of K", "kinds/attention.py", 'k_bytes if "kv" in views else 0', "0"),
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

PLAN = [
    Mutant("the chosen part is ignored", "plan/refine.py", " & chosen.contains(starts + src_low)\n", "\n"),
    Mutant("the destination's part is ignored", "plan/refine.py", " & dst.owned.contains(starts + dst_low)", ""),
    Mutant(
        "no cut where the destination's digit wraps",
        "plan/refine.py",
        "        _digit_edges(dst.owned, dst_inner, dst_low, length),\n",
        "",
    ),
    Mutant(
        "no cut where the source's digit wraps",
        "plan/refine.py",
        "        _digit_edges(src.owned, src_inner, src_low, length),\n",
        "",
    ),
    Mutant(
        "no cut where the destination's part ends",
        "plan/refine.py",
        "        dst.owned.edges(dst_low, dst_low + length) - dst_low,\n",
        "",
    ),
    Mutant(
        "no cut where the chosen part ends",
        "plan/refine.py",
        "        chosen.edges(src_low, src_low + length) - src_low,\n",
        "",
    ),
    Mutant(
        "a digit wraps one too late",
        "plan/refine.py",
        "local = np.arange(-(-first // extent), -(-last // extent), dtype=np.int64) * extent",
        "local = np.arange(-(-first // extent), -(-last // extent), dtype=np.int64) * extent + 1",
    ),
    Mutant(
        "the destination's window starts at its page",
        "plan/refine.py",
        "_locate(dst, dst_inner, starts + dst_low)",
        "_locate(dst, dst_inner, starts)",
    ),
    Mutant(
        "strips of different pages are folded",
        "plan/refine.py",
        "same = (following.loops, following.src_page, following.dst_page) == (\n            first.loops,\n            first.src_page,\n            first.dst_page,\n        )",
        "same = following.loops == first.loops",
    ),
    Mutant(
        "strips at uneven distances are folded",
        "plan/refine.py",
        "if not same or (step is not None and distance != step):",
        "if not same:",
    ),
    Mutant(
        "coalesce looks at the source only",
        "plan/pattern.py",
        "loop.src_step == length and loop.dst_step == length",
        "loop.src_step == length",
    ),
    Mutant(
        "loops are joined by the source only",
        "plan/pattern.py",
        "loop.src_step == last.src_step * last.count and loop.dst_step == last.dst_step * last.count",
        "loop.src_step == last.src_step * last.count",
    ),
    Mutant(
        "fuse ignores the destination",
        "plan/pattern.py",
        "(np.diff(src) == length) & (np.diff(dst) == length)",
        "(np.diff(src) == length)",
    ),
    Mutant("fuse joins regions", "plan/pattern.py", " & (np.diff(region) == 0)", ""),
    Mutant(
        "fields are fused in unequal numbers",
        "plan/pattern.py",
        "if sizes[0] == 1 or (sizes != sizes[0]).any():",
        "if sizes[0] == 1:",
    ),
    Mutant(
        "pages are cut on the source's side only",
        "plan/bind.py",
        "sizes = {src_size, dst_size}",
        "sizes = {src_size}",
    ),
    Mutant(
        "an index that two intervals touch is moved twice",
        "plan/bind.py",
        "start, stop = max(end, start_token // stream.tokens_per_index), stop_token",
        "start, stop = start_token // stream.tokens_per_index, stop_token",
    ),
    Mutant(
        "a partial page is left behind",
        "plan/bind.py",
        "stop_token += stream.tokens_per_index - 1 if stream.keep_partial else 0",
        "stop_token += 0",
    ),
    Mutant(
        "a ring does not wrap",
        "plan/bind.py",
        "        logical = logical % span.ring_pages\n",
        "        logical = np.minimum(logical, span.ring_pages - 1)\n",
    ),
    Mutant(
        "tables are aligned by their front",
        "plan/bind.py",
        "return table.pages[logical - table.first_page]",
        "return table.pages[logical % len(table.pages)]",
    ),
    Mutant(
        "pages are merged without a look at the destination",
        "plan/bind.py",
        " & (dst_at[:-1] + lengths[:-1] == dst_at[1:])",
        "",
    ),
    Mutant("pages are merged if one run continues", "plan/bind.py", "~continues.all(axis=1)", "~continues.any(axis=1)"),
    Mutant(
        "lengths of several fields in the wrong order",
        "plan/bind.py",
        "np.tile(length_flat[part], len(src_bases))",
        "np.repeat(length_flat[part], len(src_bases))",
    ),
    Mutant(
        "the source's page stride on both sides",
        "plan/bind.py",
        "dst_at = dst_page * lane.dst_page_stride_bytes",
        "dst_at = dst_page * lane.src_page_stride_bytes",
    ),
    Mutant(
        "patterns of different bases together",
        "plan/bind.py",
        "(len(pattern.lengths), pattern.bases.src.tobytes())",
        '(len(pattern.lengths), b"")',
    ),
    Mutant(
        "overlaps that differ in length only are one",
        "plan/bind.py",
        "code = (table[:, 0] * scale + table[:, 1]) * scale + table[:, 2]",
        "code = table[:, 0] * scale + table[:, 1]",
    ),
    Mutant(
        "copies beyond the first list are lost",
        "plan/bind.py",
        "for low in range(0, len(length_flat), max_copies):",
        "for low in range(0, min(len(length_flat), max_copies), max_copies):",
    ),
    Mutant(
        "a span forgets the period of what was chosen",
        "plan/route.py",
        "whole = math.lcm(indices, chosen.period)",
        "whole = indices",
    ),
    Mutant(
        "a ring's capacity is one page",
        "plan/route.py",
        "ring * per_page // mapped.owned.run",
        "per_page // mapped.owned.run",
    ),
    Mutant(
        "election is not sticky",
        "plan/election.py",
        "candidates = (owners & reads[dst_rank]) or owners",
        "candidates = owners",
    ),
    Mutant(
        "the lowest replica does all the work",
        "plan/election.py",
        "key=lambda rank: (load[rank], rank)",
        "key=lambda rank: rank",
    ),
    Mutant(
        "the wrong replica",
        "plan/election.py",
        "settled[dst_rank, owners] = src_rank",
        "src_rank = settled[dst_rank, owners] = min(load, key=lambda rank: (load[rank], rank))",
    ),
    Mutant(
        "a rank that nobody reads is never told",
        "plan/election.py",
        "return {rank: appointed.get(rank, self.readers[rank]) for rank in self.src_ranks}",
        "return {rank: self.readers[rank] for rank in self.src_ranks}",
    ),
    Mutant(
        "boxes are joined over a corner",
        "plan/election.py",
        "if last is not None and last[:number] + last[number + 1 :] == box[:number] + box[number + 1 :]:",
        "if last is not None:",
    ),
    Mutant("atoms are joined over a gap", "plan/cover.py", "first.stop == second.start:", "True:"),
    Mutant(
        "atoms have no edges of the first owner",
        "plan/cover.py",
        "(owned.edges(0, period) for owned in distinct)",
        "(owned.edges(0, period) for owned in distinct[1:])",
    ),
    Mutant("a hole is let through", "plan/check.py", "if written < wanted:", "if written < 0:"),
    Mutant("an overlap is let through", "plan/check.py", "        if all(shared):\n", "        if False:\n"),
    Mutant(
        "out of bounds is let through",
        "plan/check.py",
        "if base < region.address or base + reach > region.address + region.size_bytes:",
        "if base < region.address:",
    ),
    Mutant(
        "a rank reads what its source does not hold",
        "plan/check.py",
        "if wanted * periods[1] != given * periods[0]:",
        "if not given:",
    ),
    Mutant("other encodings are moved", "plan/match.py", "if src.encoding != dst.encoding:", "if False:"),
    Mutant("other extents are moved", "plan/match.py", "if src_axis.extent != dst_axis.extent:", "if False:"),
    Mutant("every field is optional", "plan/match.py", "    if field.optional:\n", "    if True:\n"),
    Mutant(
        "the null page is moved",
        "plan/request_check.py",
        "if group.null_page is not None and (pages == group.null_page).any():",
        "if False:",
    ),
    Mutant(
        "pages outside the pool are moved",
        "plan/request_check.py",
        "(pages < 0) | (pages >= group.num_pages)",
        "(pages < 0)",
    ),
    Mutant(
        "a page is written twice", "plan/request_check.py", "    if np.logical_or.reduce(again):\n", "    if False:\n"
    ),
    Mutant(
        "a state of another moment is moved",
        "plan/request_check.py",
        "if src.num_tokens != dst.num_tokens:",
        "if src.num_tokens < dst.num_tokens:",
    ),
    Mutant(
        "overwritten entries of a ring are moved",
        "plan/request_check.py",
        "if absorbed - start > span.capacity:",
        "if absorbed - start > 2 * span.capacity:",
    ),
    Mutant(
        "a table that starts too late is let through",
        "plan/request_check.py",
        "if low < table.first_page or high",
        "if high",
    ),
    Mutant(
        "a table that ends too early is let through",
        "plan/request_check.py",
        " or high > table.first_page + len(table.pages):",
        ":",
    ),
    Mutant(
        "tokens that the source lacks are moved", "plan/request_check.py", "if stop > table.num_tokens:", "if False:"
    ),
    Mutant("a new page may be anybody's", "plan/request_check.py", "    if len(stray):\n", "    if False:\n"),
    Mutant(
        "the last byte of a page is not zeroed",
        "plan/fill.py",
        "stops.append(first + slab.page_bytes)",
        "stops.append(first + slab.page_bytes - 1)",
    ),
    Mutant(
        "what was copied is zeroed",
        "plan/copies.py",
        "left = _inside(whole, low) & ~_inside(taken, low)",
        "left = _inside(whole, low)",
    ),
    Mutant("a range inside another ends it", "plan/copies.py", "np.maximum.accumulate(stop[order])", "stop[order]"),
    Mutant("boxes over the edge of a page", "plan/slot.py", " | (page[1:] != page[:-1])", ""),
    Mutant(
        "a slot forgets the gaps before a run",
        "plan/slot.py",
        "slot_offsets[box_of] + src - src[starts][box_of])",
        "slot_offsets[box_of])",
    ),
    Mutant(
        "staged moves of all lengths are alike",
        "plan/slot.py",
        "chosen = np.flatnonzero((pattern.lengths == length) & (pattern.dst_pages == page))",
        "chosen = np.flatnonzero(pattern.dst_pages == page)",
    ),
    Mutant(
        "joined overlaps forget which page they go to",
        "plan/slot.py",
        "label.reshape(-1) + number",
        "label.reshape(-1)",
    ),
    Mutant(
        "staged fields all go to the first",
        "plan/stage.py",
        "slice(field, field + fields_each), reads",
        "slice(0, fields_each), reads",
    ),
    Mutant(
        "a packed batch is permuted from where it was",
        "plan/stage.py",
        "slot_offset=move.slot_offset + filled",
        "slot_offset=move.slot_offset",
    ),
    Mutant(
        "batches are packed that do not fit",
        "plan/stage.py",
        " or filled + batch.slots_bytes > buffer_bytes",
        "",
    ),
    Mutant(
        "batches of two ranks are packed",
        "plan/stage.py",
        "waiting[0].reads.src_rank != rank or ",
        "",
    ),
    Mutant(
        "whole pages begin a page early",
        "plan/whole.py",
        "low, high = -(-start // size), stop // size",
        "low, high = start // size, stop // size",
    ),
    Mutant(
        "the part behind the whole pages is forgotten",
        "plan/whole.py",
        "[(start, low * size), (high * size, stop)]",
        "[(start, low * size)]",
    ),
    Mutant(
        "whole pages of a ring do not wrap",
        "plan/whole.py",
        "np.arange(low, high) % span.ring_pages",
        "np.arange(low, high)",
    ),
    Mutant(
        "destination pages stay unsorted",
        "plan/whole.py",
        "src_page, dst_page = src_page[order], dst_page[order]",
        "src_page = src_page[order]",
    ),
    Mutant(
        "pages are joined that are neighbours at the source only",
        "plan/whole.py",
        "continues = (steps == 1) & (dst_page[1:] - dst_page[:-1] == 1)",
        "continues = steps == 1",
    ),
    Mutant("joined pages are one page long", "plan/whole.py", "None] * times).reshape", "None] + 0 * times).reshape"),
    Mutant("pages are joined that do not touch", "plan/whole.py", "joins = sheaf.joins and pages", "joins = pages"),
    Mutant(
        "a table begins at page 0",
        "plan/whole.py",
        "table.pages[low - table.first_page : high - table.first_page]",
        "table.pages[low:high]",
    ),
    Mutant(
        "lanes of other strides are one sheaf",
        "plan/stream.py",
        "(lane.src_rank, *strides, alike, _way(lane))",
        "(lane.src_rank, alike, _way(lane))",
    ),
    Mutant(
        "lanes of two ownerships are one stream",
        "plan/stream.py",
        "key = (groups, _sides(lane), lane.tokens_per_index",
        "key = (groups, lane.along is None, lane.tokens_per_index",
    ),
    Mutant(
        "lists of two source ranks are one",
        "plan/reads.py",
        "lists[copies.src_rank, copies.dst_rank].append(copies)",
        "lists[0, copies.dst_rank].append(copies)",
    ),
    Mutant(
        "only the first group's ids are looked at",
        "plan/request_check.py",
        "pages = _joined([one.ids for one in found])",
        "pages = found[0].ids",
    ),
    Mutant(
        "the last page of an interval is not looked at",
        "plan/request_check.py",
        "return Touched(group, table.pages, low - table.first_page, high - table.first_page)",
        "return Touched(group, table.pages, low - table.first_page, high - table.first_page - 1)",
    ),
]

TRANSPORT = [
    Mutant(
        "remote pages are counted in local ones",
        "transport/frames.py",
        "entries * np.int32(frame.remote_count)",
        "entries * np.int32(frame.local_count)",
    ),
    Mutant(
        "the rest of a cut entry is forgotten",
        "transport/frames.py",
        "self._entry += stop == num_pages",
        "self._entry += 1",
    ),
    Mutant(
        "an entry's pages start over",
        "transport/frames.py",
        "return self._slice(first, first + 1, start, stop)",
        "return self._slice(first, first + 1, 0, stop - start)",
    ),
    Mutant(
        "a frame's last page is not looked at", "transport/frames.py", "np.uint64((count - 1) * stride)", "np.uint64(0)"
    ),
    Mutant("pages behind a frame are let in", "transport/framed.py", "or high >= count:", "or False:"),
    Mutant(
        "only the lowest piece is looked at",
        "transport/regions.py",
        "or np.maximum.reduce(address + (length_bytes - _ONE)) > self._last[index]",
        "",
    ),
    Mutant("long pieces are not cut", "transport/slices.py", "> MAX_PIECE_BYTES:", "> 2**62:"),
    Mutant(
        "each slice begins with the first row",
        "transport/slices.py",
        "rows[:, 0], rows[:, 1] = self.address[first:last], length_bytes",
        "rows[:, 0], rows[:, 1] = self.address[: last - first], length_bytes",
    ),
]

MUTANTS = [*MODEL, *KINDS, *PLAN, *TRANSPORT]
