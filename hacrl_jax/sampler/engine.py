"""The decode engine: prefill, insert, generate over slots, in the shape of google-jetstream's Engine.

A slot is a row of the cache. ``prefill`` turns prompts into a Prefix, ``insert`` copies one into slots, ``generate``
draws one token for every live slot, ``generate_many`` several in one dispatch. Everything is a pure function of arrays:
the decode state is donated from call to call and stays on the device. What differs from JetStream's own engines: one
prefix fills many slots, every slot has its own random key, tokens come with log-probs, and the finished rows are found
and kept on the device.

Extra letters: S slots, C cache entries of a slot, W the window: entries that the longest live row may use.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding

from hacrl_jax import sharding
from hacrl_jax.config import RolloutConfig
from hacrl_jax.models import decoder
from hacrl_jax.models.decoder import DecoderConfig
from hacrl_jax.sampler.sampling import Sampling, draw, sampling
from hacrl_jax.types import Array, Params, UserError

PREFILL_TOKENS = 4096  # tokens of one prefill call: enough to fill the matrix units, few enough to keep waits short
SMALLEST_BUCKET = 16
SMALLEST_WINDOW = 64
MAX_SLOTS = 256


@struct.dataclass
class Prefix:
    """Prompts ready to be inserted. The last token of a prompt is not in the cache: the first decode step feeds it."""

    cache: tuple[Array, Array]  # keys and values, each [L, b, P, K * h]
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
    cache: tuple[Array, Array]  # keys and values, each [L, S, C, K * h]
    token: Array  # [S] int32, the token to feed next
    length: Array  # [S] int32, live cache entries
    step: Array  # [S] int32, tokens drawn for this row so far
    limit: Array  # [S] int32
    row: Array  # [S] int32
    key: Array  # [S] random keys, one per (problem, sample)
    live: Array  # [S] bool
    answers: Answers


@struct.dataclass
class Drawn:
    """One decode step's result per slot; valid is False for slots without a request."""

    token: Array  # [S] int32
    logprob: Array  # [S] float32
    valid: Array  # [S] bool
    length: Array  # [S] int32, tokens of the row so far
    finished: Array  # [S] bool: this was the row's last token


class Engine:
    """The compiled programs of one policy's sampler, and the sizes they are made for."""

    def __init__(
        self,
        graphdef: Any,
        model: DecoderConfig,
        params: Params,
        *,
        eos: tuple[int, ...],
        vocab_size: int,
        config: RolloutConfig,
        mesh: Mesh | None = None,
        dtype: Any = jnp.float32,
        axes: Any = None,
    ):
        """params: shapes only are read. axes: their logical axes, where the sampler's copy is to be laid out on mesh.

        Raises UserError when prompt and response together exceed the model's positions.
        """
        total = config.max_prompt + config.max_response
        if total > model.max_position_embeddings:
            raise UserError(
                f"rollout: max_prompt {config.max_prompt} + max_response {config.max_response} exceeds the model's "
                f"{model.max_position_embeddings} positions; lower one of them"
            )
        self.graphdef, self.model, self.config, self.mesh, self.dtype = graphdef, model, config, mesh, jnp.dtype(dtype)
        self.eos, self.vocab_size = tuple(eos), vocab_size
        cache_dtype = self.dtype if config.cache_dtype == "auto" else jnp.dtype(config.cache_dtype)
        rows = config.prompts * config.samples
        self.slots = _slots(config.slots or min(rows, MAX_SLOTS), mesh)
        self.rows = rows
        self.prefill_buckets = _doubling(SMALLEST_BUCKET, config.max_prompt)
        self.windows = _doubling(SMALLEST_WINDOW, -(-total // SMALLEST_BUCKET) * SMALLEST_BUCKET)
        self.cache_shape = (
            model.num_hidden_layers,
            self.slots,
            self.windows[-1],
            model.num_key_value_heads * model.head_dim,
        )
        self._cache_dtype = cache_dtype
        self._params_sharding = None
        if mesh is not None and axes is not None:
            self._params_sharding = sharding.shardings(axes, mesh, params)
        place = self._placement()
        self._load = jax.jit(partial(_cast, self.dtype), out_shardings=self._params_sharding)
        self._reload = jax.jit(
            lambda old, new: _cast(self.dtype, new), donate_argnums=0, out_shardings=self._params_sharding,
            keep_unused=True,
        )  # fmt: skip
        self._prefill = jax.jit(partial(_prefill, graphdef, self.dtype, cache_dtype))
        self._insert = jax.jit(_insert, donate_argnums=0, out_shardings=place)
        self._release = jax.jit(_release, donate_argnums=0, out_shardings=place)
        self._empty = jax.jit(self._zeros, static_argnums=0, out_shardings=place)
        step = partial(_step, graphdef, self.dtype, self.eos, vocab_size)
        self._step = jax.jit(step, donate_argnums=1, out_shardings=place and (place, None))
        self._many = jax.jit(
            partial(_many, step), donate_argnums=1, static_argnames="window", out_shardings=place and (place, None)
        )

    # JetStream's contract

    @property
    def max_concurrent_decodes(self) -> int:
        return self.slots

    @property
    def samples_per_slot(self) -> int:
        return 1

    @property
    def max_prefill_length(self) -> int:
        return self.config.max_prompt

    @property
    def colocated_cpus(self) -> None:
        return None

    def load_params(self, params: Params, previous: Params | None = None) -> Params:
        """The sampler's own copy in the compute dtype, on the engine's mesh; previous is an older copy whose memory
        it takes. Never aliases params, which the learner's next update may donate."""
        with self._on_mesh():
            return self._load(params) if previous is None else self._reload(previous, params)

    def init_decode_state(self) -> DecodeState:
        """All slots free, no answers."""
        with self._on_mesh():
            return self._empty(self.rows)

    def prefill(self, *, params: Params, padded_tokens: Any, true_length: Any, existing_prefix: None = None) -> Prefix:
        """Keys and values of prompts: padded_tokens [P] or [b, P], true_length [] or [b], from 1 to P."""
        if existing_prefix is not None:
            raise NotImplementedError("prefill continues no existing prefix")
        tokens = jnp.atleast_2d(jnp.asarray(padded_tokens, jnp.int32))
        with self._on_mesh():
            return self._prefill(params, tokens, jnp.atleast_1d(jnp.asarray(true_length, jnp.int32)))

    def insert(
        self,
        prefix: Prefix,
        decode_state: DecodeState,
        slot: int,
        *,
        key: Array | None = None,
        problem: int = 0,
        sample: int = 0,
        row: int | None = None,
        limit: int | None = None,
    ) -> DecodeState:
        """The first prompt of prefix into one slot; its answer is kept in ``row`` (default: nowhere)."""
        limit = self.config.max_response if limit is None else limit
        row = self.rows if row is None else row
        requests = self.requests([(0, slot, row, sample, problem, limit)])
        return self.bulk_insert(prefix, decode_state, requests, jax.random.key(0) if key is None else key)

    def generate(
        self, params: Params, decode_state: DecodeState, settings: Sampling | None = None
    ) -> tuple[DecodeState, Drawn]:
        """One token for every live slot."""
        settings = sampling(self.config.temperature) if settings is None else settings
        with self._on_mesh():
            return self._step(params, decode_state, settings)

    # Additions

    def requests(self, entries: list[tuple[int, int, int, int, int, int]]) -> Requests:
        """Entries (row of the prefix, slot, row of the answer, sample, problem id, limit), at most S of them."""
        table = np.zeros((6, self.slots), np.int32)
        table[:, : len(entries)] = np.asarray(entries, np.int32).reshape(-1, 6).T
        return Requests(*table, count=np.int32(len(entries)))

    def bulk_insert(self, prefix: Prefix, decode_state: DecodeState, requests: Requests, key: Array) -> DecodeState:
        """Prompts into slots; the key of a row is key folded with its problem id and sample."""
        with self._on_mesh():
            return self._insert(decode_state, prefix, requests, key)

    def free_resource(self, decode_state: DecodeState, slot: Array) -> DecodeState:
        """End the rows in these slots ([S] bool) where they are."""
        with self._on_mesh():
            return self._release(decode_state, slot)

    def generate_many(
        self, params: Params, decode_state: DecodeState, settings: Sampling, *, steps: int, free: int, window: int
    ) -> tuple[DecodeState, Array]:
        """Up to ``steps`` tokens for every live slot: fewer when ``free`` slots are free, when none is live, or when a
        live row would leave the window. Returns (state, status [S + 1] int32: live entries of each slot, -1 when it
        is free; then the steps done)."""
        with self._on_mesh():
            return self._many(params, decode_state, settings, np.int32(steps), np.int32(free), window=window)

    def window(self, entries: int) -> int:
        """The smallest window in which a row with this many live entries can take a step."""
        return next((size for size in self.windows if size > entries), self.windows[-1])

    def prefill_shape(self, longest: int) -> tuple[int, int]:
        """(prompts per call, bucket) for prompts up to ``longest`` tokens."""
        bucket = next(size for size in self.prefill_buckets if size >= longest)
        rows = max(1, min(PREFILL_TOKENS // bucket, self.config.prompts))
        return rows, bucket

    def warm_up(self, params: Params, settings: tuple[Sampling, ...] = ()) -> Iterator[str]:
        """Compile every program by running it on nothing; yields the name of each as it becomes ready."""
        settings = settings or (sampling(self.config.temperature),)
        state, nothing, key = self.init_decode_state(), self.requests([]), jax.random.key(0)
        for bucket in self.prefill_buckets:
            rows, _ = self.prefill_shape(bucket)
            prefix = self.prefill(
                params=params, padded_tokens=np.zeros((rows, bucket), np.int32), true_length=np.ones(rows, np.int32)
            )
            state = self.bulk_insert(prefix, state, nothing, key)
            yield f"prefill and insert, {rows} prompts of {bucket}"
        for choice in settings:
            for window in self.windows:
                state, _ = self.generate_many(params, state, choice, steps=0, free=0, window=window)
                yield f"decode, {self.slots} slots in a window of {window}, {choice.mode}"

    def _zeros(self, rows: int) -> DecodeState:
        s, r = self.slots, self.config.max_response
        number = partial(jnp.zeros, dtype=jnp.int32)
        return DecodeState(
            cache=tuple(jnp.zeros(self.cache_shape, self._cache_dtype) for _ in range(2)),
            token=number(s),
            length=number(s),
            step=number(s),
            limit=number(s),
            row=number(s),
            key=jax.random.split(jax.random.key(0), s),
            live=jnp.zeros(s, bool),
            answers=Answers(number((rows, r)), jnp.zeros((rows, r)), number(rows), jnp.zeros(rows, bool)),
        )

    def _placement(self) -> Any:
        """Where each part of the decode state lies: slots over data and fsdp, kv heads over tensor."""
        if self.mesh is None:
            return None
        heads = self.model.num_key_value_heads
        whole = sharding.sharding(self.mesh, "kv_heads", shape=(heads,)).spec[0] is not None
        cache = sharding.sharding(self.mesh, None, "batch", None, "kv_heads" if whole else None)
        slot, same = sharding.sharding(self.mesh, "batch"), sharding.replicated(self.mesh)
        answers = Answers(same, same, same, same)
        return DecodeState((cache, cache), slot, slot, slot, slot, slot, slot, slot, answers)

    def get_prefix_destination_sharding(self) -> NamedSharding | None:
        return None if self.mesh is None else sharding.replicated(self.mesh)

    def _on_mesh(self) -> Any:
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def _cast(dtype: Any, params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def _prefill(graphdef: Any, dtype: Any, cache_dtype: Any, params: Params, tokens: Array, length: Array) -> Prefix:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    # Padding stands behind the prompt, where causal attention does not see it.
    _, cache = decoder.apply(graphdef, params, tokens, positions, dtype=dtype)
    last = jnp.take_along_axis(tokens, length[:, None] - 1, axis=1)[:, 0]
    return Prefix(tuple(part.astype(cache_dtype) for part in cache), last, length - 1)


def _insert(state: DecodeState, prefix: Prefix, requests: Requests, key: Array) -> DecodeState:
    def copy(i: Array, cache: tuple[Array, Array]) -> tuple[Array, Array]:
        rows = (jax.lax.dynamic_slice_in_dim(part, requests.prefix[i], 1, axis=1) for part in prefix.cache)
        at = (0, requests.slot[i], 0, 0)
        return tuple(jax.lax.dynamic_update_slice(part, row, at) for part, row in zip(cache, rows, strict=True))

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


def _release(state: DecodeState, slot: Array) -> DecodeState:
    return state.replace(live=state.live & ~slot)


def _step(
    graphdef: Any,
    dtype: Any,
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
    )
    keys = jax.vmap(jax.random.fold_in)(state.key, state.step)
    token, logprob = draw(decoder.logits(params, hidden[:, 0]), keys, settings, vocab_size)
    live, row, step = state.live, state.row, state.step
    is_eos = (token[:, None] == jnp.asarray(eos, jnp.int32)).any(axis=1)
    finished = live & (is_eos | (step + 1 >= state.limit))
    answers = state.answers
    kept = jnp.where(live, row, answers.length.shape[0])  # past the end: dropped
    answers = Answers(
        token=answers.token.at[kept, step].set(token, mode="drop"),
        logprob=answers.logprob.at[kept, step].set(logprob, mode="drop"),
        length=answers.length.at[kept].set(step + 1, mode="drop"),
        stopped=answers.stopped.at[kept].set(is_eos, mode="drop"),
    )
    # A free slot writes too, always to the same entry: insert sets its length anew, and entries above are never live.
    slots = jnp.arange(token.shape[0])
    cache = tuple(
        part.at[:, slots, state.length].set(fresh[:, :, 0].astype(part.dtype))
        for part, fresh in zip(state.cache, new, strict=True)
    )
    state = state.replace(
        cache=cache,
        token=jnp.where(live, token, state.token),
        length=state.length + live,
        step=step + live,
        live=live & ~finished,
        answers=answers,
    )
    return state, Drawn(token, logprob, live, state.step, finished)


def _many(
    step: Any,
    params: Params,
    state: DecodeState,
    settings: Sampling,
    steps: Array,
    free: Array,
    *,
    window: int,
) -> tuple[DecodeState, Array]:
    def goes_on(carry: tuple[Array, DecodeState]) -> Array:
        done, state = carry
        fits = jnp.max(jnp.where(state.live, state.length, 0)) < window
        return (done < steps) & jnp.any(state.live) & (jnp.sum(~state.live) < free) & fits

    def advance(carry: tuple[Array, DecodeState]) -> tuple[Array, DecodeState]:
        return carry[0] + 1, step(params, carry[1], settings)[0]

    done, state = jax.lax.while_loop(goes_on, advance, (jnp.int32(0), state))
    return state, jnp.append(jnp.where(state.live, state.length, -1), done)


def _slots(wanted: int, mesh: Mesh | None) -> int:
    """A multiple of the devices that slots are split over."""
    parts = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-wanted // parts) * parts


def _doubling(first: int, last: int) -> tuple[int, ...]:
    """first, twice first, ... and last."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)
