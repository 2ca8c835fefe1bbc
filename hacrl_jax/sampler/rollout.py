"""Continuous batching: every sample of a step through the engine's slots, in a fixed order.

The scheduler never reads the clock: which sample enters which slot after which step depends on the lengths alone. It
reads the status of a dispatch while the next one runs. A dispatch ends by itself once enough slots are free while
samples wait, and one that finds them free at its start does nothing; so a freed slot idles for no longer than the copy
of a few numbers to the host takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hacrl_jax.sampler.decode import Answers, DecodeState, Prefix, Status
from hacrl_jax.sampler.engine import Engine
from hacrl_jax.sampler.sampling import Sampling, sampling
from hacrl_jax.types import Array, Params, Rollouts, UserError

Watch = Callable[[int, np.ndarray, bool], bool]
"""Told of every sample's new tokens and whether it has finished; True ends the sample there."""


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
    work = Work(params, settings, key, np.asarray(prompt), lengths, ids, limits, samples)
    per_pass = engine.rows // samples * samples or engine.rows
    parts = []
    for first in range(0, rows, per_pass):
        count = min(per_pass, rows - first)
        answers = _run(engine, work, range(first, first + count))
        parts.append(jax.tree.map(lambda x, count=count: x[:count], answers))
    whole = parts[0] if len(parts) == 1 else jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return Rollouts(
        prompt=jnp.asarray(prompt, jnp.int32),
        prompt_length=jnp.asarray(prompt_length, jnp.int32),
        response=whole.token[:, :longest],
        length=whole.length,
        logprob=whole.logprob[:, :longest],
        stopped=whole.stopped,
    )


def _run(engine: Engine, work: Work, rows: range) -> Answers:
    """These samples, as many prompts in each of the engine's lanes; the answer of the first one is row 0.

    A lane has its own queue, so that its schedule is fixed, and its own thread: JAX runs what one thread dispatches in
    order, what several do at once.
    """
    share = -(-len(rows) // (work.samples * engine.lanes)) * work.samples
    queues = [deque(rows[i : i + share]) for i in range(0, len(rows), share)]
    one = lambda queue: Schedule(engine, work, queue, rows.start).run()  # noqa: E731
    if len(queues) == 1:
        return one(queues[0])
    with ThreadPoolExecutor(len(queues)) as threads:
        return reduce(engine.join, threads.map(one, queues))


@dataclass(frozen=True)
class Work:
    """What is to be sampled: ``samples`` answers to each of B prompts; sample s belongs to prompt s // samples."""

    params: Params  # the engine's copy
    settings: Sampling
    key: Array
    tokens: np.ndarray  # [B, P] int, right-padded
    lengths: np.ndarray  # [B]
    ids: np.ndarray  # [B] problem ids
    limits: np.ndarray  # [B * samples] tokens at most
    samples: int


@dataclass
class Schedule:
    """The samples that wait and those that run, on the host."""

    engine: Engine
    work: Work
    queue: deque[int]  # samples that wait, in order
    first: int | None = None  # the sample whose answer is row 0 of the engine's; None: answers are not kept
    watch: Watch | None = None
    prefix: Prefix | None = None
    prefilled: range = range(0)  # prompts in prefix
    slot: dict[int, int] = field(default_factory=dict)  # of each sample that runs
    entries: dict[int, int] = field(default_factory=dict)  # of each sample that runs: upper bound of the live ones

    def run(self) -> Answers:
        """Everything in the queue, to its end."""
        engine, steps = self.engine, self.engine.config.dispatch_steps
        state = engine.init_decode_state(0)
        free = list(range(engine.slots))
        unread: deque[tuple[Status, dict[int, int]]] = deque()
        while True:
            state, free = self._fill(state, free)
            state = self._fit(self._shrink(state))
            # Free slots end a dispatch: enough for the samples that wait or, once none does, for fewer slots.
            quota = max(1, state.slots // 16) if self.queue else state.slots - engine.fewer(state.slots)
            state, status = engine.generate_many(self.work.params, state, self.work.settings, steps=steps, free=quota)
            jax.tree.map(lambda x: x.copy_to_host_async(), status if self.watch else status.entries)
            unread.append((status, dict(self.slot)))
            self.entries = {sample: bound + steps for sample, bound in self.entries.items()}
            if len(unread) < 2:
                continue
            freed, ended = self._read(*unread.popleft())
            free += freed
            if ended:
                state = engine.free_resource(state, np.isin(np.arange(state.slots), ended))
            if not self.queue and not self.entries:
                return state.answers

    def _read(self, status: Status, running: dict[int, int]) -> tuple[list[int], list[int]]:
        """Take in the status of the dispatch before the last, in which ``running`` had these slots: the slots that are
        free now, and those of them whose rows ``watch`` ended."""
        live, freed, ended = np.asarray(status.entries), [], []
        token, count = (np.asarray(status.token), np.asarray(status.count)) if self.watch else (None, None)
        for sample, slot in running.items():
            if sample not in self.slot:
                continue  # ended before
            self.entries[sample] = int(live[slot]) + self.engine.config.dispatch_steps
            finished = bool(live[slot] < 0)
            cut = bool(self.watch and self.watch(sample, token[: count[slot], slot], finished)) and not finished
            if cut:
                ended.append(self.slot[sample])
            if finished or cut:
                del self.entries[sample]
                freed.append(self.slot.pop(sample))
        return freed, ended

    def _shrink(self, state: DecodeState) -> DecodeState:
        """As few slots as the rows that are left need, once no sample waits."""
        while not self.queue and len(self.slot) <= self.engine.fewer(state.slots):
            state = self.engine.shrink(state, list(self.slot.values()))
            self.slot = {sample: slot for slot, sample in enumerate(self.slot)}
        return state

    def _fit(self, state: DecodeState) -> DecodeState:
        """A window for half a dispatch of every live row; a smaller one only once it will do for a while."""
        most, steps = max(self.entries.values(), default=0), self.engine.config.dispatch_steps
        needed, ample = (self.engine.window(most + more, state.slots) for more in (steps // 2, 4 * steps))
        if needed > state.window or ample < state.window:
            state = self.engine.resize(state, needed)
        return state

    def _fill(self, state: DecodeState, free: list[int]) -> tuple[DecodeState, list[int]]:
        """Waiting samples into free slots, prompt by prompt."""
        work, samples = self.work, self.work.samples
        while self.queue and free:
            if self.queue[0] // samples not in self.prefilled:
                self._prefill()
            batch = []
            while self.queue and free and self.queue[0] // samples in self.prefilled:
                number, slot = self.queue.popleft(), free.pop(0)
                prompt = number // samples
                self.slot[number], self.entries[number] = slot, int(work.lengths[prompt]) - 1
                row = self.engine.rows if self.first is None else number - self.first
                source, problem, limit = prompt - self.prefilled.start, int(work.ids[prompt]), int(work.limits[number])
                batch.append((source, slot, row, number % samples, problem, limit))
            state = self._fit(state)
            state = self.engine.bulk_insert(self.prefix, state, self.engine.requests(batch), work.key)
        return state, free

    def _prefill(self) -> None:
        """The next prompts, as many as one call takes; a prompt outlives the call until its samples are inserted."""
        start, end = self.queue[0] // self.work.samples, self.queue[-1] // self.work.samples + 1
        rows, bucket = self.engine.prefill_shape(int(self.work.lengths[start]))
        while True:  # the bucket of the longest among them
            longest = int(self.work.lengths[start : min(start + rows, end)].max())
            rows, wider = self.engine.prefill_shape(longest)
            if wider == bucket:
                break
            bucket = wider
        count = min(rows, end - start)
        tokens, length = np.zeros((rows, bucket), np.int32), np.ones(rows, np.int32)
        width = min(bucket, self.work.tokens.shape[1])
        tokens[:count, :width] = self.work.tokens[start : start + count, :width]
        length[:count] = self.work.lengths[start : start + count]
        self.prefix = self.engine.prefill(params=self.work.params, padded_tokens=tokens, true_length=length)
        self.prefilled = range(start, start + count)
