"""An engine's model runner, which executes steps of vLLM's scheduler with a model that repeats its input.

As `GPUModelRunner` does (vLLM 0.32.0): tables of running requests grow, those of resumed ones are replaced; blocks are copied;
states in cache mode `align` move on to the page of the step's last token (`mamba_utils.preprocess_mamba`). Every kernel first
looks for all that its tokens attend to, on every rank, then writes its tokens. Drafts that are not accepted leave something else behind.
With asynchronous scheduling vLLM counts them as accepted until it hears (`late`). Drafts step a state into the blocks behind its own, one
each; the next step begins with that of the last one accepted, and a boundary between pages that lies among them is copied to where
prefix hits look for it (`postprocess_mamba_fused_kernel`). Windows that are replayed after a prefix hit
have nothing before the replay's start, nor before the last window of a step. Of a ring a step needs the tokens of the group that is not complete yet, and
leaves its own last ones there, with drafts all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from tests.vllm.engines import Side
from tests.vllm.simulation.content import RankContent
from tests.vllm.simulation.text import Text
from vllm.v1.kv_cache_interface import ChunkedLocalAttentionSpec, CircularBufferSpec, MambaSpec, SlidingWindowSpec
from vllm.v1.outputs import ModelRunnerOutput


class WrongCache(AssertionError):
    """A kernel was shown something else than its text has."""


@dataclass
class _Running:
    text: Text
    num_prompt_tokens: int
    tables: list[list[int]]
    start: int
    num_known_tokens: int
    replay_start: int = 0


@dataclass
class Runner:
    """All ranks of one engine; `specs`: one per group of the scheduler."""

    side: Side
    texts: Mapping[str, Text]
    count_accepted: Callable[[int], int]
    content: list[RankContent] = field(init=False)
    specs: list[Any] = field(init=False)
    running: dict[str, _Running] = field(default_factory=dict)
    state_places: dict[tuple[str, int], int] = field(default_factory=dict)
    state_steps: dict[tuple[str, int], int] = field(default_factory=dict)
    """How many blocks behind its own a state stands, by request and group."""
    num_tokens_looked_at: int = 0
    rejected: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.content = [RankContent(self.side, rank.rank) for rank in self.side.layout.ranks]
        self.specs = []
        for group in self.side.configs[0].kv_cache_groups:
            inner = getattr(group.kv_cache_spec, "kv_cache_specs", None)
            self.specs.append(next(iter(inner.values())) if inner else group.kv_cache_spec)
        fields = self.side.layout.fields
        self.group_tokens = max(axis.tokens_per_index for field in fields for axis in field.axes)

    def poison(self, blocks: list[int]) -> None:
        for rank in self.content:
            for block in blocks:
                rank.poison(block)

    def forward(self, step: Any, late: Mapping[str, int]) -> ModelRunnerOutput:
        """Compute a step. `late`: drafts of a request that it had not heard of when it was scheduled. Raises WrongCache."""
        self._update(step, late)
        self.rejected = {}
        names = list(step.num_scheduled_tokens)
        drafts = step.scheduled_spec_decode_tokens
        sampled = [self._compute(name, step.num_scheduled_tokens[name], drafts.get(name, ())) for name in names]
        return ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: place for place, name in enumerate(names)},
            sampled_token_ids=sampled,
        )

    def _update(self, step: Any, late: Mapping[str, int]) -> None:
        cached = step.scheduled_cached_reqs
        for name in step.finished_req_ids:
            self.running.pop(name, None)
        for name in {*step.finished_req_ids, *(step.preempted_req_ids or ()), *cached.resumed_req_ids}:
            for number in range(len(self.specs)):
                self.state_places.pop((name, number), None)
                self.state_steps.pop((name, number), None)
        for copy in step.kv_cache_block_copies or ():
            for rank in self.content:
                for group in self.side.layout.groups:
                    rank.copy_page(group.name, copy.src_block_id, copy.dst_block_id)
        for new in step.scheduled_new_reqs:
            self._begin(new)
        for place, name in enumerate(cached.req_ids):
            one = self.running[name]
            blocks = cached.new_block_ids[place]
            is_resumed = name in cached.resumed_req_ids
            one.start = cached.num_computed_tokens[place] - (0 if is_resumed else late.get(name, 0))
            if is_resumed:
                one.num_known_tokens = one.num_prompt_tokens + cached.num_output_tokens[place]
                one.tables = [list(ids) for ids in blocks]
            elif blocks is not None:
                for table, more in zip(one.tables, blocks, strict=True):
                    table.extend(more)

    def _begin(self, new: Any) -> None:
        """The newer runner hears of a resumed request as of a new one."""
        num_prompt = len(new.prompt_token_ids)
        num_known = num_prompt if new.prefill_token_ids is None else len(new.prefill_token_ids)
        tables = [list(ids) for ids in new.block_ids]
        self.running[new.req_id] = _Running(
            self.texts[new.req_id],
            num_prompt,
            tables,
            new.num_computed_tokens,
            num_known,
            getattr(new, "replay_start", 0),
        )
        for number in range(len(self.specs)):
            self.state_places.pop((new.req_id, number), None)
            self.state_steps.pop((new.req_id, number), None)

    def _compute(self, name: str, num_tokens: int, drafts: Sequence[int]) -> list[int]:
        one = self.running[name]
        start, end = one.start, one.start + num_tokens - len(drafts)
        is_saying = end >= one.num_known_tokens
        if not one.text.can_compute(start, end):
            raise WrongCache(f"{name}, step {start} to {end}: computes {one.text.picture}, which is not here")
        assert is_saying or not drafts, (name, start, end, one.num_known_tokens)
        num_accepted = self.count_accepted(len(drafts)) if drafts else 0
        right_end = end + num_accepted
        for number, spec in enumerate(self.specs):
            if isinstance(spec, MambaSpec):
                self._step_state(name, number, start, end, right_end, len(drafts))
            elif isinstance(spec, CircularBufferSpec):
                self._turn_ring(name, one, number, start, right_end, end + len(drafts))
            else:
                self._attend(name, one, number, start, right_end, end + len(drafts))
        if not is_saying:
            return []
        assert end == one.num_known_tokens, (name, start, end, one.num_known_tokens)
        self.rejected[name] = len(drafts) - num_accepted
        one.num_known_tokens = right_end + 1
        return one.text.tokens[end : right_end + 1]

    def _attend(self, name: str, one: _Running, number: int, start: int, right_end: int, end: int) -> None:
        spec, table = self.specs[number], one.tables[number]
        first = first_looked_at(spec, start)
        if getattr(spec, "bounded_replay", False):
            first = min(start, max(first, one.replay_start))
        earlier, now = np.arange(first, start), np.arange(start, end)
        if getattr(spec, "bounded_replay", False) and len(now) > spec.sliding_window:
            # Its layers are computed for the last of a step's tokens only, and look no further back (`deepseek_v41/nvidia/model.py`).
            earlier, now = earlier[:0], now[-spec.sliding_window :]
        group = f"g{number}"
        page_tokens = self.side.layout.group_by_name[group].tokens_per_page
        assert page_tokens is not None
        self.num_tokens_looked_at += len(earlier)
        for token in (*earlier.tolist(), *now.tolist()):
            if token // page_tokens >= len(table) or table[token // page_tokens] == 0:
                raise WrongCache(f"{name}, group {number}, step {start} to {end}: token {token} has no page in {table}")
        self._look_and_write(
            f"{name}, group {number} ({type(spec).__name__})", group, one, table, earlier, now, right_end
        )

    def _turn_ring(self, name: str, one: _Running, number: int, start: int, right_end: int, end: int) -> None:
        """What is not compressed yet: of the group that `start` is in, its earlier tokens."""
        table = one.tables[number]
        if len(table) != 1 or not table[0]:
            raise WrongCache(f"{name}, group {number}, step {start} to {end}: no page for a ring in {table}")
        has_drafts = end - start <= self.specs[number].block_size and right_end < end
        first = start if has_drafts else max(start, end - self.group_tokens)
        earlier, now = np.arange(start // self.group_tokens * self.group_tokens, start), np.arange(first, end)
        self._look_and_write(f"{name}, ring {number}", f"g{number}", one, table, earlier, now, right_end)

    def _look_and_write(
        self,
        what: str,
        group: str,
        one: _Running,
        table: list[int],
        earlier: np.ndarray,
        now: np.ndarray,
        right_end: int,
    ) -> None:
        for rank in self.content:
            wrong = rank.wrong(group, table, earlier, one.text.held(earlier))
            if wrong:
                raise WrongCache(f"{what}, step of {now}: tokens {wrong} are not there, pages {table}")
            held = one.text.held(np.minimum(now, right_end))
            rank.write(group, table, now, np.where(now < right_end, held, ~held))

    def _step_state(self, name: str, number: int, start: int, end: int, right_end: int, num_drafts: int) -> None:
        """From `start` tokens to `end`, and on through the drafts; those up to `right_end` are right."""
        spec, group, key = self.specs[number], f"g{number}", (name, number)
        table, text = self.running[name].tables[number], self.running[name].text
        is_aligned, place, steps = spec.mamba_cache_mode == "align", 0, self.state_steps.get(key, 0)
        if is_aligned:
            before = self.state_places.get(key, (start - 1) // spec.block_size)
            place = -(-(end + num_drafts) // spec.block_size) - 1
            self.state_places[key] = place
            if before not in (-1, place):
                self._copy_state(group, table[before + steps], table[place])
                steps = 0
        used = table[place : place + num_drafts + 1]
        if len(used) <= num_drafts or not all(used):
            raise WrongCache(f"{name}, group {number}, step {start} to {end}: no page for a state in {table}")
        for rank in self.content:
            if start and not rank.has_state(group, table[place + steps], text.state(start)):
                raise WrongCache(
                    f"{name}, group {number}, step {start} to {end}: the state is another's, page {table[place + steps]}"
                )
            for step, page in enumerate(used):
                held = text.state(min(end + step, right_end))
                rank.write_state(group, page, held if end + step <= right_end else ~held)
        self.state_steps[key] = right_end - end
        boundary = right_end // spec.block_size * spec.block_size
        if is_aligned and boundary >= end:
            kept = boundary // spec.block_size - 1
            self._copy_state(group, table[place + boundary - end], table[kept])
            if kept == place:
                self.state_steps[key] = 0

    def _copy_state(self, group: str, src: int, dst: int) -> None:
        if src != dst:
            for rank in self.content:
                rank.copy_page(group, src, dst)


def first_looked_at(spec: Any, token: int) -> int:
    """The first token that this one attends to."""
    if isinstance(spec, SlidingWindowSpec):
        return int(max(0, token - spec.sliding_window + 1))
    if isinstance(spec, ChunkedLocalAttentionSpec):
        return int(token // spec.attention_chunk_size * spec.attention_chunk_size)
    return 0
