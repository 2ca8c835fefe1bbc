"""The sampler's device programs, as pure functions, and the records that they pass on.

Extra letters: S slots, W the window: cache entries per slot, b prompts of a prefill.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from hacrl_jax.models import decoder
from hacrl_jax.models.attention import Implementation, entry_axes
from hacrl_jax.sampler.sampling import Sampling, draw
from hacrl_jax.types import Array, Params

Cache = tuple[tuple[Array, Array], ...]
"""Keys and values of each of the L layers: [S, W, K * h] each, or for unrolled attention keys of [S, K * h, W]."""


@struct.dataclass
class Prefix:
    """Prompts ready to be inserted. The last token of a prompt is not in the cache: the first decode step feeds it."""

    cache: Cache  # its entries are the b prompts' P tokens
    token: Array  # [b] int32, the last token of the prompt
    length: Array  # [b] int32, live entries: prompt length - 1


@struct.dataclass
class Requests:
    """What goes into which slot: [S] each, of which the first ``count`` are meant."""

    prefix: Array  # int32, row of the Prefix
    slot: Array  # int32
    row: Array  # int32, where the answer is kept
    sample: Array  # int32, which sample of its prompt
    problem: Array  # int32, the problem's id
    limit: Array  # int32, tokens at most
    count: Array  # [] int32


@struct.dataclass
class Answers:
    """What was drawn so far, by row: N rows of R tokens."""

    token: Array  # [N, R] int32
    logprob: Array  # [N, R] float32
    length: Array  # [N] int32
    stopped: Array  # [N] bool


@struct.dataclass
class DecodeState:
    cache: Cache
    token: Array  # [S] int32, the token to feed next
    length: Array  # [S] int32, live cache entries
    step: Array  # [S] int32, tokens drawn for this row so far
    limit: Array  # [S] int32
    row: Array  # [S] int32
    key: Array  # [S] random keys, one per (problem, sample)
    live: Array  # [S] bool
    answers: Answers

    @property
    def slots(self) -> int:
        return self.token.shape[0]

    @property
    def window(self) -> int:
        return self.cache[0][1].shape[1]


@struct.dataclass
class Drawn:
    """One decode step's result per slot; valid is False for slots without a request."""

    token: Array  # [S] int32
    logprob: Array  # [S] float32
    valid: Array  # [S] bool
    stopped: Array  # [S] bool: the token is an end-of-sequence id
    length: Array  # [S] int32, tokens of the row so far


@struct.dataclass
class Status:
    """What a dispatch did, for the host: copied while the next one runs."""

    entries: Array  # [S + 1] int32: live entries of each slot, -1 where it is free; then the steps done
    token: Array  # [T, S] int32, the tokens drawn; those of a slot are the first `count` of its column
    count: Array  # [S] int32


def prefill(
    graphdef: Any,
    dtype: Any,
    cache_dtype: Any,
    attention: Implementation,
    params: Params,
    tokens: Array,
    length: Array,
) -> Prefix:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # Padding stands behind the prompt, where causal attention does not see it.
    _, cache = decoder.apply(graphdef, params, tokens, positions, dtype=dtype)
    last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
    cache = each(attention, lambda axis, part: jnp.moveaxis(part.astype(cache_dtype), 1, axis), cache)
    return Prefix(cache, last, length - 1)


def each(attention: Implementation, function: Callable[..., Array], *caches: Cache) -> Cache:
    """function(axis of the entries, part of each cache) of every layer's keys and values."""
    axes = entry_axes(attention)
    return tuple(tuple(map(function, axes, *pairs)) for pairs in zip(*caches, strict=True))


def insert(
    attention: Implementation, state: DecodeState, prefix: Prefix, requests: Requests, key: Array
) -> DecodeState:
    def copy(i: Array, cache: Cache) -> Cache:
        def one(axis: int, part: Array, source: Array) -> Array:
            row = jax.lax.dynamic_slice_in_dim(source, requests.prefix[i], 1)
            row = jax.lax.slice_in_dim(row, 0, min(row.shape[axis], part.shape[axis]), axis=axis)
            return jax.lax.dynamic_update_slice(part, row, (requests.slot[i], 0, 0))

        return each(attention, one, cache, prefix.cache)

    slots = state.token.shape[0]
    used = jnp.arange(slots) < requests.count
    target = jnp.where(used, requests.slot, slots)  # past the end: dropped
    keys = jax.vmap(lambda problem, sample: jax.random.fold_in(jax.random.fold_in(key, problem), sample))(
        requests.problem, requests.sample
    )

    def put(old: Array, new: Array) -> Array:
        return old.at[target].set(new, mode="drop")

    return state.replace(
        cache=jax.lax.fori_loop(0, requests.count, copy, state.cache),
        token=put(state.token, prefix.token[requests.prefix]),
        length=put(state.length, prefix.length[requests.prefix]),
        step=put(state.step, jnp.zeros_like(state.step)),
        limit=put(state.limit, requests.limit),
        row=put(state.row, requests.row),
        key=put(state.key, keys),
        live=put(state.live, used),
    )


def release(state: DecodeState, slot: Array) -> DecodeState:
    return state.replace(live=state.live & ~slot)


def step(
    graphdef: Any,
    dtype: Any,
    attention: Implementation,
    eos: tuple[int, ...],
    vocab_size: int,
    params: Params,
    state: DecodeState,
    settings: Sampling,
) -> tuple[DecodeState, Drawn]:
    hidden, new = decoder.apply(
        graphdef,
        params,
        state.token[:, None],
        state.length[:, None],
        cache=state.cache,
        cache_length=state.length,
        dtype=dtype,
        attention=attention,
    )
    keys = jax.vmap(jax.random.fold_in)(state.key, state.step)
    token, logprob = draw(decoder.logits(params, hidden[:, 0]), keys, settings, vocab_size)
    live = state.live
    is_eos = ends(eos, token)
    # A free slot writes too, always to the same entry: insert sets its length anew, and what lies above is never live.
    # That the place depends on the token (no id is negative) tells XLA that the caches have been read by then: else it
    # copies them all, in every step, so as to read the one while it writes the other.
    slots, at = jnp.arange(token.shape[0]), jnp.where(token >= 0, state.length, state.window)

    def put(axis: int, part: Array, fresh: Array) -> Array:
        place = part.at[slots, at] if axis == 1 else part.at[slots, :, at]
        return place.set(fresh[:, 0].astype(part.dtype), mode="drop")

    cache = each(attention, put, state.cache, new)
    step = state.step + live
    state = state.replace(
        cache=cache,
        token=jnp.where(live, token, state.token),
        length=state.length + live,
        step=step,
        live=live & ~is_eos & (step < state.limit),
    )
    return state, Drawn(token, logprob, live, is_eos, step)


def ends(eos: tuple[int, ...], token: Array) -> Array:
    """Whether each token [S] is one of the ids that end a response."""
    return (token[:, None] == jnp.asarray(eos, jnp.int32)).any(axis=1)


def many(
    one: Any,
    eos: tuple[int, ...],
    most: int,
    params: Params,
    state: DecodeState,
    settings: Sampling,
    steps: Array,
    free: Array,
) -> tuple[DecodeState, Status]:
    """Up to ``steps`` steps (``most`` at most): fewer when ``free`` slots are free, none is live, or a live row has
    filled its window. The answers take in what was drawn, once, at the end."""
    before = state

    def goes_on(carry: tuple[Array, DecodeState, Array, Array]) -> Array:
        done, state, *_ = carry
        fits = jnp.max(jnp.where(state.live, state.length, 0)) < state.window
        return (done < steps) & jnp.any(state.live) & (jnp.sum(~state.live) < free) & fits

    def advance(carry: tuple[Array, DecodeState, Array, Array]) -> tuple[Array, DecodeState, Array, Array]:
        done, state, token, logprob = carry
        state, drawn = one(params, state, settings)
        return done + 1, state, token.at[done].set(drawn.token), logprob.at[done].set(drawn.logprob)

    shape = (most, before.live.shape[0])
    start = (jnp.int32(0), state, jnp.zeros(shape, jnp.int32), jnp.zeros(shape))
    done, state, token, logprob = jax.lax.while_loop(goes_on, advance, start)
    count = state.step - before.step
    rows = before.answers.length.shape[0]
    row = jnp.where(count > 0, before.row, rows)  # past the end: dropped
    position = before.step + jnp.arange(most)[:, None]  # [T, S]
    drawn = jnp.where(jnp.arange(most)[:, None] < count, row, rows)
    last = token[jnp.maximum(count - 1, 0), jnp.arange(shape[1])]
    answers = Answers(
        token=state.answers.token.at[drawn, position].set(token, mode="drop"),
        logprob=state.answers.logprob.at[drawn, position].set(logprob, mode="drop"),
        length=state.answers.length.at[row].set(state.step, mode="drop"),
        stopped=state.answers.stopped.at[row].set(ends(eos, last), mode="drop"),
    )
    entries = jnp.append(jnp.where(state.live, state.length, -1), done)
    return state.replace(answers=answers), Status(entries, token, count)


def take(rows: DecodeState, slot: Array, count: Array) -> DecodeState:
    """All but the cache of the first ``count`` of these slots [S'], in that order; the slots after them are free."""
    taken = jax.tree.map(lambda x: x[slot], rows.replace(cache=(), answers=None))
    return taken.replace(live=taken.live & (jnp.arange(slot.shape[0]) < count), answers=rows.answers)


def take_cache(axis: int, window: int, part: Array, slot: Array) -> Array:
    """One layer's keys or values of these slots, in a window no smaller than theirs."""
    return resize(axis, window, part[slot])


def resize(axis: int, window: int, part: Array) -> Array:
    """One layer's keys or values in another window: entries (along axis) past the longest live row come or go."""
    kept = jax.lax.slice_in_dim(part, 0, min(window, part.shape[axis]), axis=axis)
    grown = [(0, window - kept.shape[axis] if i == axis else 0) for i in range(part.ndim)]
    return jnp.pad(kept, grown)
