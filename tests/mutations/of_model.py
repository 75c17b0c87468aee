"""In which ways is the model broken to see whether the tests notice? See `mutant`."""

from mutant import Mutant

MUTANTS = [
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
        "regions of one rank may share bytes",
        "model/layout_check.py",
        "before.address + before.size_bytes > after.address",
        "before.address > after.address",
    ),
    Mutant(
        "regions that touch are refused",
        "model/layout_check.py",
        "before.address + before.size_bytes > after.address",
        "before.address + before.size_bytes >= after.address",
    ),
    Mutant(
        "regions that follow one another are not told from others",
        "model/layout_check.py",
        "if not any(map(gt, ends, rank.addresses[1:])):",
        "if not all(map(gt, ends, rank.addresses[1:])):",
    ),
    Mutant(
        "cells that share bytes are let through",
        "model/page_runs.py",
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
    Mutant(
        "ranks of one outline: page strides are not looked at",
        "model/layout_check.py",
        ", *(pages.form(g) for g in rank.geometries))",
        ")",
    ),
    Mutant(
        "ranks of one outline: pages of the first only",
        "model/layout_check.py",
        "pages.runs(rank, field, rank.geometries[kind[0]])",
        "pages.runs(rank, field, layout.ranks[0].geometries[kind[0]])",
    ),
    Mutant(
        "packed: numbers go one too far", "model/packed.py", "max(numbers) >= len(things)", "max(numbers) > len(things)"
    ),
    Mutant(
        "packed: every device is the first",
        "model/packed.py",
        "if len(set(rank.devices)) == 1 else rank.devices",
        "if rank.devices else rank.devices",
    ),
    Mutant(
        "packed: optional fields are not told",
        "model/packed.py",
        "shape.element_bytes, shape.encoding, shape.optional) for",
        "shape.element_bytes, shape.encoding, False) for",
    ),
    Mutant(
        "an outline forgets offsets",
        "model/layout.py",
        "return starts[self.outline.region_numbers] + self.outline.offsets",
        "return starts[self.outline.region_numbers]",
    ),
    Mutant(
        "an address may end above all memory",
        "model/layout.py",
        "            or max(map(add, self.addresses, outline.region_bytes)) > MAX_ADDRESS\n",
        "",
    ),
    Mutant(
        "slabs of one stride are not compared",
        "model/layout_check.py",
        "if len(by_stride) == 1 and all(",
        "if len(by_stride) == 1 or all(",
    ),
]
