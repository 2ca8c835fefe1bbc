"""Continuous batching: every sample of a step through the engine's slots, in a fixed order.

The scheduler never reads the clock: which sample enters which slot after which step depends on the lengths alone. It
reads the status of a dispatch while the next one runs. A dispatch ends by itself once enough slots are free while
samples wait, and one that finds them free at its start does nothing; so a freed slot idles for no longer than the copy
of a few numbers to the host takes.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np

from hacrl_jax.sampler.engine import DecodeState, Engine, Prefix
from hacrl_jax.sampler.sampling import Sampling, sampling
from hacrl_jax.types import Array, Params, Rollouts, UserError


def rollout(
    engine: Engine,
    params: Params,
    prompt: Any,
    prompt_length: Any,
    problem_id: Any,
    key: Array,
    *,
    samples: int,
    temperature: float | None = None,
    top_p: float = 1.0,
    top_k: int = 0,
    min_p: float = 0.0,
    max_response: int = 0,
    limit: Any = None,
) -> Rollouts:
    """``samples`` answers to every prompt. A sample depends on key, its problem id, and its number alone.

    prompt [B, P] int32, right-padded; prompt_length [B]; problem_id [B]. temperature None and max_response 0 stand for
    the engine's config. limit [B * samples] (optional) ends each row at its own length. params: the engine's copy
    (load_params) or the policy's own. Raises UserError for a prompt that is empty or longer than max_prompt.
    """
    settings = sampling(engine.config.temperature if temperature is None else temperature, top_p, top_k, min_p)
    longest = max_response or engine.config.max_response
    if longest > engine.config.max_response:
        raise UserError(f"max_response {longest} exceeds rollout.max_response {engine.config.max_response}")
    lengths, ids = np.asarray(prompt_length), np.asarray(problem_id)
    for length, problem in zip(lengths, ids, strict=True):
        if not 1 <= length <= engine.config.max_prompt:
            raise UserError(
                f"the prompt of problem {problem} has {length} tokens; rollout.max_prompt is {engine.config.max_prompt}"
            )
    rows = len(lengths) * samples
    limits = np.full(rows, longest) if limit is None else np.minimum(np.asarray(limit), longest)
    tokens = np.asarray(prompt)
    per_pass = engine.rows // samples * samples or engine.rows
    parts = []
    for first in range(0, rows, per_pass):
        queue = deque(range(first, min(first + per_pass, rows)))
        work = _Pass(engine, params, settings, key, tokens, lengths, ids, limits, samples, first, queue)
        parts.append(work.run())
    cut = [
        (part.token[:n, :longest], part.logprob[:n, :longest], part.length[:n], part.stopped[:n])
        for part, n in zip(parts, [min(per_pass, rows - i) for i in range(0, rows, per_pass)], strict=True)
    ]
    response, logprob, length, stopped = (
        cut[0] if len(cut) == 1 else (jnp.concatenate(x) for x in zip(*cut, strict=True))
    )
    return Rollouts(
        prompt=jnp.asarray(prompt, jnp.int32),
        prompt_length=jnp.asarray(prompt_length, jnp.int32),
        response=response,
        length=length,
        logprob=logprob,
        stopped=stopped,
    )


@dataclass
class _Pass:
    """One filling of the engine's answer rows: what waits, what runs where."""

    engine: Engine
    params: Params
    settings: Sampling
    key: Array
    tokens: np.ndarray  # [B, P]
    lengths: np.ndarray  # [B]
    ids: np.ndarray  # [B]
    limits: np.ndarray  # [N]
    samples: int
    first: int  # the sample whose answer is row 0
    queue: deque[int]  # samples that wait, in order
    prefix: Prefix | None = None
    prefilled: range = range(0)  # prompts in prefix
    sample: dict[int, int] = field(default_factory=dict)  # slot -> the sample that runs in it
    entries: dict[int, int] = field(default_factory=dict)  # slot -> upper bound of its live cache entries

    def run(self) -> Any:
        engine, steps = self.engine, self.engine.config.dispatch_steps
        state = engine.init_decode_state()
        free = list(range(engine.slots))
        unread: deque[tuple[Array, dict[int, int]]] = deque()
        while True:
            state, free = self._fill(state, free)
            window = engine.window(max(self.entries.values(), default=0))
            # With nothing left to insert, free slots end no dispatch.
            quota = max(1, engine.slots // 16) if self.queue else engine.slots + 1
            state, status = engine.generate_many(
                self.params, state, self.settings, steps=steps, free=quota, window=window
            )
            status.copy_to_host_async()
            unread.append((status, dict(self.sample)))
            self.entries = {slot: bound + steps for slot, bound in self.entries.items()}
            if len(unread) < 2:
                continue
            free += self._read(*unread.popleft())
            if not self.queue and not self.entries:
                return state.answers

    def _read(self, status: Array, running: dict[int, int]) -> list[int]:
        """Take in the status of the dispatch before the last, in which ``running`` ran; the slots it freed."""
        live, freed = np.asarray(status), []
        for slot, sample in running.items():
            if self.sample.get(slot) != sample:
                continue  # freed before, and filled anew since
            self.entries[slot] = int(live[slot]) + self.engine.config.dispatch_steps
            if live[slot] < 0:
                del self.sample[slot], self.entries[slot]
                freed.append(slot)
        return freed

    def _fill(self, state: DecodeState, free: list[int]) -> tuple[DecodeState, list[int]]:
        """Waiting samples into free slots, prompt by prompt."""
        while self.queue and free:
            if self.queue[0] // self.samples not in self.prefilled:
                self._prefill()
            batch = []
            while self.queue and free and self.queue[0] // self.samples in self.prefilled:
                sample, slot = self.queue.popleft(), free.pop(0)
                prompt = sample // self.samples
                self.sample[slot], self.entries[slot] = sample, int(self.lengths[prompt]) - 1
                batch.append(
                    (prompt - self.prefilled.start, slot, sample - self.first, sample % self.samples,
                     int(self.ids[prompt]), int(self.limits[sample]))
                )  # fmt: skip
            state = self.engine.bulk_insert(self.prefix, state, self.engine.requests(batch), self.key)
        return state, free

    def _prefill(self) -> None:
        """The next prompts, as many as one call takes; a prompt outlives the call until its samples are inserted."""
        start, end = self.queue[0] // self.samples, self.queue[-1] // self.samples + 1
        rows, bucket = self.engine.prefill_shape(int(self.lengths[start]))
        while True:  # the bucket of the longest among them
            longest = int(self.lengths[start : min(start + rows, end)].max())
            rows, wider = self.engine.prefill_shape(longest)
            if wider == bucket:
                break
            bucket = wider
        count = min(rows, end - start)
        tokens, length = np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32)
        width = min(bucket, self.tokens.shape[1])
        tokens[:count, :width] = self.tokens[start : start + count, :width]
        length[:count] = self.lengths[start : start + count]
        self.prefix = self.engine.prefill(params=self.params, padded_tokens=tokens, true_length=length)
        self.prefilled = range(start, start + count)
