"""The decode engine: prefill, insert, generate over slots, in the shape of google-jetstream's Engine.

A slot is a row of the cache. ``prefill`` turns prompts into a Prefix, ``insert`` copies one into slots, ``generate``
draws one token for every live slot, ``generate_many`` several in one dispatch (decode.py has these functions). The
decode state is donated from call to call and stays on the device. What differs from JetStream's own engines: one prefix
fills many slots, every slot has its own random key, tokens come with log-probs, finished rows are found and their
answers kept on the device, and the cache is no longer than the longest live row needs: it moves between a few windows.
Once no sample waits, the rows that are left move to fewer slots: a step then costs what they cost.

Extra letters: S slots, W the window: cache entries per slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding

from hacrl_jax import sharding
from hacrl_jax.config import RolloutConfig
from hacrl_jax.models import decoder
from hacrl_jax.models.attention import Implementation, entry_axes
from hacrl_jax.models.decoder import DecoderConfig
from hacrl_jax.sampler import decode
from hacrl_jax.sampler.decode import Answers, Cache, DecodeState, Drawn, Prefix, Requests, Status
from hacrl_jax.sampler.sampling import Sampling, sampling
from hacrl_jax.types import Array, Params, UserError

PREFILL_TOKENS = 4096  # tokens of one prefill call: enough to fill the matrix units, few enough to keep waits short
PREFILL_BUCKETS = (1 / 8, 1 / 4, 1 / 2, 1)  # of max_prompt
WINDOWS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4, 1)  # of max_prompt + max_response
STEP = 16  # sizes are multiples of it
MAX_SLOTS = 256
LANES, LANE_SLOTS = 2, 16  # on one CPU, and the fewest slots of each


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
        attention: Implementation | None = None,
        lanes: int | None = None,
    ):
        """params: shapes only are read. axes: their logical axes, where the sampler's copy is to be laid out on mesh.
        attention: over the cache; by default what suits the mesh's platform (attention.unrolled says why).
        lanes: decode states that rollout runs at once, which share config.slots. By default one, and on one CPU two:
        the products of a step are too small for two cores (with 64 rows of 192 entries, width 256, two states of 32
        took 0.9 of the time of one).

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
        self.rows = rows
        self._attention = attention or _attention(mesh)
        slots = _slots(config.slots or min(rows, MAX_SLOTS), mesh)
        alone = self._attention == "unrolled" and (mesh is None or mesh.size == 1)
        self.lanes = lanes or (LANES if alone and slots >= LANES * LANE_SLOTS else 1)
        self.slots = -(-slots // self.lanes)  # of each lane
        self.prefill_buckets = _sizes(config.max_prompt, PREFILL_BUCKETS)
        self.windows = _sizes(total, WINDOWS)
        self.slot_counts = tuple(sorted({_slots(max(1, self.slots >> i), mesh) for i in range(config.shrink + 1)}))
        self._cache_dtype = cache_dtype
        copied = None if mesh is None or axes is None else _copy_shardings(axes, mesh, params)
        place = self._placement()
        pair = place and (place, sharding.replicated(mesh))  # every host reads what a step tells
        step = partial(decode.step, graphdef, self.dtype, self._attention, self.eos, vocab_size)
        load = partial(_load, self.dtype)
        self._load = jax.jit(load, out_shardings=copied)
        self._reload = jax.jit(
            lambda params, previous: load(params), donate_argnums=1, keep_unused=True, out_shardings=copied
        )
        self._empty = jax.jit(self._zeros, static_argnums=0, out_shardings=place)
        self._prefill = jax.jit(partial(decode.prefill, graphdef, self.dtype, cache_dtype, self._attention))
        self._insert = jax.jit(partial(decode.insert, self._attention), donate_argnums=0, out_shardings=place)
        self._release = jax.jit(decode.release, donate_argnums=0, out_shardings=place)
        self._join = jax.jit(partial(jax.tree.map, jnp.add))
        self._take = jax.jit(decode.take, out_shardings=place and place.replace(cache=()))
        # Of keys and of values.
        laid = [*zip(entry_axes(self._attention), place.cache[0] if place else (None, None), strict=True)]
        self._resize = [
            jax.jit(partial(decode.resize, axis), static_argnums=0, out_shardings=part) for axis, part in laid
        ]
        self._take_cache = [
            jax.jit(partial(decode.take_cache, axis), static_argnums=0, out_shardings=part) for axis, part in laid
        ]
        self._step = jax.jit(step, donate_argnums=1, out_shardings=pair)
        many = partial(decode.many, step, self.eos, config.dispatch_steps)
        self._many = jax.jit(many, donate_argnums=1, out_shardings=pair)

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
        """The sampler's own copy: in the compute dtype, its layers apart (decoder.unstack), on the engine's mesh.

        previous is an older copy whose memory it takes. Never aliases params, which the learner's next update donates.
        """
        with self._on_mesh():
            return self._load(params) if previous is None else self._reload(params, previous)

    def init_decode_state(self, entries: int | None = None) -> DecodeState:
        """All slots free, no answers, in a window for rows of so many live cache entries (default: the largest)."""
        with self._on_mesh():
            return self._empty(self.windows[-1] if entries is None else self.window(entries))

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
        self, params: Params, decode_state: DecodeState, settings: Sampling, *, steps: int, free: int
    ) -> tuple[DecodeState, Status]:
        """Up to ``steps`` tokens for every live slot: fewer when ``free`` slots are free, when none is live, or when a
        live row has filled the window."""
        with self._on_mesh():
            return self._many(params, decode_state, settings, np.int32(steps), np.int32(free))

    def join(self, answers: Answers, others: Answers) -> Answers:
        """What two lanes have drawn: a row that a lane did not fill is 0."""
        return self._join(answers, others)

    def windows_of(self, slots: int) -> tuple[int, ...]:
        """The windows of a state with so many slots. Fewer than all come at the end, when the rows that are left are
        long, and a wider window costs them little: the two upper ones of every second, for the sake of the warm-up."""
        return self.windows if slots == self.slots else self.windows[::-2][1::-1]

    def window(self, entries: int, slots: int | None = None) -> int:
        """The smallest window in which a row with this many live entries can take a step."""
        windows = self.windows_of(slots or self.slots)
        return next((size for size in windows if size > entries), windows[-1])

    def resize(self, decode_state: DecodeState, window: int) -> DecodeState:
        """The cache in another of the engine's windows, one layer after the other and one window at a time: the copy
        needs little memory, and every pair of neighbours is compiled in the warm-up."""
        windows = self.windows_of(decode_state.slots)
        now, wanted = (windows.index(size) for size in (decode_state.window, window))
        step = 1 if wanted > now else -1
        for i in range(now, wanted, step):
            cache = self._copied(decode_state.cache, [partial(resize, windows[i + step]) for resize in self._resize])
            decode_state = decode_state.replace(cache=cache)
        return decode_state

    def fewer(self, slots: int) -> int:
        """The next smaller number of slots, 0 below the smallest."""
        return max((count for count in self.slot_counts if count < slots), default=0)

    def shrink(self, decode_state: DecodeState, kept: Sequence[int]) -> DecodeState:
        """The rows of the slots ``kept``, in that order, in the next smaller number of slots; other rows end."""
        slot = np.zeros(self.fewer(decode_state.slots), np.int32)
        slot[: len(kept)] = kept
        with self._on_mesh():
            taken = self._take(decode_state.replace(cache=()), slot, np.int32(len(kept)))
        window = self.window(decode_state.window - 1, len(slot))
        copies = [lambda part, take=take: take(window, part, slot) for take in self._take_cache]
        cache = self._copied(decode_state.cache, copies)
        return taken.replace(cache=cache)

    def _copied(self, cache: Cache, copies: Sequence[Callable[[Array], Array]]) -> Cache:
        """Keys and values by a copy each; an old part is freed before the next is copied."""

        def one(copy: Callable[[Array], Array], part: Array) -> Array:
            with self._on_mesh():
                copied = copy(part)
            part.delete()
            return copied

        return tuple(tuple(map(one, copies, pair)) for pair in cache)

    def prefill_shape(self, longest: int) -> tuple[int, int]:
        """(prompts per call, bucket) for prompts up to ``longest`` tokens."""
        bucket = next(size for size in self.prefill_buckets if size >= longest)
        rows = max(1, min(PREFILL_TOKENS // bucket, -(-self.config.prompts // self.lanes)))
        return rows, bucket

    def warm_up(self, params: Params, settings: tuple[Sampling, ...] = ()) -> Iterator[str]:
        """Compile every program by running it on nothing; yields the name of each as it becomes ready."""
        settings = settings or (sampling(self.config.temperature),)
        nothing, key = self.requests([]), jax.random.key(0)
        prefixes = []
        for bucket in self.prefill_buckets:
            rows, _ = self.prefill_shape(bucket)
            length = np.ones(rows, np.int32)
            prefixes.append(self.prefill(params=params, padded_tokens=np.zeros((rows, bucket)), true_length=length))
            yield f"prefill, {rows} prompts of {bucket}"
        state = self.init_decode_state(0)
        if self.lanes > 1:
            self.join(state.answers, state.answers)
        for slots in reversed(self.slot_counts):
            windows = self.windows_of(slots)
            for window in (*windows, windows[0]):  # and back: narrowing is compiled too
                state = self.resize(state, window)
            for window in windows:
                state = self.resize(state, window)
                for prefix in prefixes if slots == self.slots else ():
                    state = self.bulk_insert(prefix, state, nothing, key)
                for choice in settings:
                    state, _ = self.generate_many(params, state, choice, steps=0, free=0)
                    yield f"decode, {slots} slots in a window of {window}, {choice.mode}"
                if self.fewer(slots):
                    smaller = self.shrink(state.replace(cache=jax.tree.map(jnp.copy, state.cache)), [])
            if self.fewer(slots):
                state = smaller

    def abstract(self, params: Params) -> dict[str, tuple[Any, tuple[Any, ...]]]:
        """The largest programs (prefill, decode) with abstract arguments, shardings included: what plan.py compiles."""
        copy = self._load.eval_shape(params)
        rows, bucket = self.prefill_shape(self.config.max_prompt)
        number = partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
        choice = jax.eval_shape(partial(sampling, self.config.temperature))
        return {
            "prefill": (self._prefill, (copy, number((rows, bucket)), number((rows,)))),
            "decode": (self._many, (copy, self._empty.eval_shape(self.windows[-1]), choice, number(()), number(()))),
        }

    def _zeros(self, window: int) -> DecodeState:
        s, n, r = self.slots, self.rows, self.config.max_response
        width = self.model.num_key_value_heads * self.model.head_dim
        shapes = ((s, window, width) if axis == 1 else (s, width, window) for axis in entry_axes(self._attention))
        keys, values = (partial(jnp.zeros, shape, self._cache_dtype) for shape in shapes)
        number = partial(jnp.zeros, dtype=jnp.int32)
        return DecodeState(
            cache=tuple((keys(), values()) for _ in range(self.model.num_hidden_layers)),
            token=number(s),
            length=number(s),
            step=number(s),
            limit=number(s),
            row=number(s),
            key=jax.random.split(jax.random.key(0), s),
            live=jnp.zeros(s, bool),
            answers=Answers(number((n, r)), jnp.zeros((n, r)), number(n), jnp.zeros(n, bool)),
        )

    def _placement(self) -> Any:
        """Where each part of the decode state lies: slots over data and fsdp, kv heads over tensor."""
        if self.mesh is None:
            return None
        heads = self.model.num_key_value_heads
        whole = sharding.sharding(self.mesh, "kv_heads", shape=(heads,)).spec[0] is not None
        width = "kv_heads" if whole else None
        laid = entry_axes(self._attention)
        orders = (("batch", None, width) if axis == 1 else ("batch", width, None) for axis in laid)
        cache = (tuple(sharding.sharding(self.mesh, *order) for order in orders),) * self.model.num_hidden_layers
        slot, same = sharding.sharding(self.mesh, "batch"), sharding.replicated(self.mesh)
        answers = Answers(same, same, same, same)
        return DecodeState(cache, slot, slot, slot, slot, slot, slot, slot, answers)

    def get_prefix_destination_sharding(self) -> NamedSharding | None:
        return None if self.mesh is None else sharding.replicated(self.mesh)

    def _on_mesh(self) -> Any:
        return nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)


def _attention(mesh: Mesh | AbstractMesh | None) -> Implementation:
    """What suits the platform; a mesh without devices stands for an accelerator (plan.py's estimate)."""
    if isinstance(mesh, AbstractMesh):
        return "xla"
    platform = jax.default_backend() if mesh is None else mesh.devices.flat[0].platform
    return "unrolled" if platform == "cpu" else "xla"


def _load(dtype: Any, params: Params) -> Params:
    return jax.tree.map(lambda leaf: leaf.astype(dtype), decoder.unstack(params))


def _copy_shardings(axes: Any, mesh: Mesh, params: Params) -> Any:
    """Where the sampler's copy lies: as the policy's parameters do, the layers apart."""
    shapes = jax.eval_shape(decoder.unstack, params)
    own = jax.tree.map(lambda leaf: leaf[1:], axes["layers"], is_leaf=lambda leaf: isinstance(leaf, tuple))
    layers = tuple(sharding.shardings(own, mesh, layer) for layer in shapes["layers"])
    rest = {name: leaf for name, leaf in axes.items() if name != "layers"}
    return sharding.shardings(rest, mesh, {name: shapes[name] for name in rest}) | {"layers": layers}


def _slots(wanted: int, mesh: Mesh | None) -> int:
    """A multiple of the devices that slots are split over."""
    parts = 1 if mesh is None else mesh.shape["data"] * mesh.shape["fsdp"]
    return -(-wanted // parts) * parts


def _sizes(largest: int, shares: tuple[float, ...]) -> tuple[int, ...]:
    """These shares of the largest size, rounded up."""
    return tuple(sorted({-(-int(largest * share) // STEP) * STEP or STEP for share in shares}))
