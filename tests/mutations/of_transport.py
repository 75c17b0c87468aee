"""In which ways is a transport broken to see whether the tests notice? See `mutant`."""

from mutant import Mutant

MUTANTS = [
    Mutant(
        "a torn slice settles before its peer is disconnected",
        "transport/owner.py",
        "if not (sliced.is_torn and sliced.peer in self._leaving)]",
        "if True]",
    ),
    Mutant(
        "indices that were written for earlier entries are handed out",
        "transport/frames.py",
        "if first not in self._indexed or last > self._indexed.stop:",
        "if not self._indexed:",
    ),
    Mutant(
        "indices are written for too few entries",
        "transport/frames.py",
        "if first not in self._indexed or last > self._indexed.stop:",
        "if first not in self._indexed:",
    ),
    Mutant(
        "a part begins where its whole does",
        "transport/base.py",
        "whole, self.first + first",
        "whole, self.first",
    ),
    Mutant(
        "a part of a part has its own place",
        "transport/base.py",
        "whole, self.first + first",
        "whole, first",
    ),
    Mutant(
        "a part takes the budget, whatever it costs",
        "transport/slices.py",
        "if int(cost[stop]) - before > budget_bytes:",
        "if False:",
    ),
    Mutant(
        "rows of a whole that was cut are taken for its pieces",
        "transport/slices.py",
        " or groups[0].length_bytes is not length",
        "",
    ),
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
    Mutant(
        "the end of a run is not looked at", "transport/framed.py", "bounds(page + (runs - 1))[1]", "bounds(page)[1]"
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
        "longest_bytes > MAX_PIECE_BYTES",
        "longest_bytes > 2**62",
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
        "transport/regions.py",
        "np.maximum.reduce(address + (length_bytes - _ONE))",
        "np.minimum.reduce(address + (length_bytes - _ONE))",
    ),
    Mutant("long pieces are not cut", "transport/slices.py", "> MAX_PIECE_BYTES:", "> 2**62:"),
    Mutant(
        "each slice begins with the first row",
        "transport/slices.py",
        "rows[:, 0], rows[:, 1] = self.address[first:last], length_bytes",
        "rows[:, 0], rows[:, 1] = self.address[: last - first], length_bytes",
    ),
]
