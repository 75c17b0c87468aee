"""In which ways is a transport broken to see whether the tests notice? See `mutant`."""

from mutant import Mutant

MUTANTS = [
    Mutant(
        "indices that were written for earlier entries are handed out",
        "model/plain_loops.py",
        "rows = slice(first - entry * num_pages, ",
        "rows = slice(0, ",
    ),
    Mutant(
        "indices are written for too few entries",
        "model/plain_loops.py",
        "-(-stop // num_pages)",
        "stop // num_pages",
    ),
    Mutant(
        "a part begins where its whole does",
        "transport/base.py",
        "return CopiesPart(self, first, stop)",
        "return CopiesPart(self, 0, stop - first)",
    ),
    Mutant(
        "the pieces of a part are those of its whole",
        "transport/base.py",
        "slice(self.first, self.stop), self.whole",
        "slice(0, self.stop - self.first), self.whole",
    ),
    Mutant(
        "a part takes the budget, whatever it costs",
        "model/plain_loops.py",
        "if int(cost_before[stop]) - before > budget:",
        "if False:",
    ),
    Mutant(
        "rows of a whole that was cut are taken for its pieces",
        "transport/slices.py",
        "        if longest > MAX_PIECE_BYTES:\n            return None\n",
        "",
    ),
    Mutant(
        "remote pages are counted in local ones",
        "transport/frames.py",
        "counts = frame.local_count, frame.remote_count",
        "counts = frame.local_count, frame.local_count",
    ),
    Mutant(
        "a piece between two slices is forgotten",
        "transport/frames.py",
        "local_index, remote_index = frame_indices(copies.local_page, copies.remote_page, counts, first, stop)",
        "local_index, remote_index = frame_indices(copies.local_page, copies.remote_page, counts, first, max(first + 1, stop - 1))",
    ),
    Mutant(
        "slices of any number of pieces are shared",
        "transport/slices.py",
        "stop - (stop - first) % SHARES if is_shared else stop",
        "stop",
    ),
    Mutant(
        "the last slice is cut in equal shares",
        "transport/slices.py",
        "stop - first >= SPLIT_PIECES and stop < end",
        "stop - first >= SPLIT_PIECES",
    ),
    Mutant(
        "an entry's pages start over",
        "transport/frames.py",
        "entry * num_pages + (cost_bytes - cost[entry] * num_pages)",
        "entry * num_pages + cost_bytes",
    ),
    Mutant(
        "a frame's last page is not looked at", "transport/frames.py", "np.uint64((count - 1) * stride)", "np.uint64(0)"
    ),
    Mutant(
        "the end of a run is not looked at",
        "model/plain_loops.py",
        "int(np.maximum.reduce(first + (counts - 1)))",
        "int(np.maximum.reduce(first))",
    ),
    Mutant(
        "runs of pages with gaps are let in",
        "transport/framed.py",
        "(self.frame.local_count if self.frame.is_dense else 1)",
        "self.frame.local_count",
    ),
    Mutant(
        "a run is one page long",
        "model/plain_loops.py",
        "(entries[2][:, None] * pages[2].astype(np.uint64))",
        "(entries[2][:, None] * np.ones_like(pages[2]).astype(np.uint64))",
    ),
    Mutant(
        "a run that must be cut is listed",
        "transport/frames.py",
        "self.longest_bytes > MAX_PIECE_BYTES",
        "self.longest_bytes > 2**62",
    ),
    Mutant(
        "an entry that must be cut stays in its frame",
        "transport/frames.py",
        "    if frame.longest_bytes > MAX_PIECE_BYTES:\n",
        "    if False:\n",
    ),
    Mutant(
        "the remote pages of a run are the local ones",
        "transport/frames.py",
        "(copies.local_page, copies.remote_page, run_pages)",
        "(copies.local_page, copies.local_page, run_pages)",
    ),
    Mutant(
        "what was found for other regions is used again",
        "transport/placed.py",
        "if known is None or known[0] is not local or known[1] is not remote:",
        "if known is None:",
    ),
    Mutant("pages behind a frame are let in", "transport/framed.py", "or high >= count:", "or False:"),
    Mutant(
        "only the lowest piece is looked at",
        "model/plain_loops.py",
        "int(np.maximum.reduce(address + (length_bytes - np.uint64(1))))",
        "int(np.minimum.reduce(address + (length_bytes - np.uint64(1))))",
    ),
    Mutant(
        "long pieces are not cut",
        "transport/slices.py",
        "int(np.maximum.reduce(length)) > MAX_PIECE_BYTES:",
        "int(np.maximum.reduce(length)) > 2**62:",
    ),
    Mutant(
        "each slice begins with the first row",
        "transport/slices.py",
        "rows[:, 0], rows[:, 1] = self.address[first:last], length_bytes",
        "rows[:, 0], rows[:, 1] = self.address[: last - first], length_bytes",
    ),
    Mutant(
        "regions that a peer tells of in any order are in order",
        "transport/regions.py",
        "if least_bytes <= 0 or not are_in_order:",
        "if least_bytes <= 0:",
    ),
    Mutant(
        "a region that a peer tells of ends a byte late",
        "transport/regions.py",
        "(start + (size - 1)).astype(np.uint64)",
        "(start + size).astype(np.uint64)",
    ),
    Mutant(
        "a piece may end in the next region",
        "transport/regions.py",
        "last <= int(self._last[region])",
        "last <= int(self._last[-1])",
    ),
    Mutant(
        "what was found for other regions is used",
        "transport/placed.py",
        "known is None or known[0] is not local or known[1] is not remote",
        "known is None",
    ),
]
