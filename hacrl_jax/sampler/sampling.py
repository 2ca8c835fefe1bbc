"""Drawing one token per row from logits, and the log-prob of what was drawn. All in float32.

The draw is Gumbel-max in two levels: among blocks of 128 ids by the log of each block's mass, then among the ids of the
chosen block. The maximum over a block of perturbed scores is distributed as its log-mass plus one Gumbel variable, so
the result has exactly the softmax's distribution, for V / 128 + 128 random numbers a row instead of V (at V = 4096,
drawing V of them took longer than the output layer's product).
"""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp
from flax import struct

from hacrl_jax.types import Array, UserError

BLOCK = 128

Mode = Literal["greedy", "plain", "filtered"]


@struct.dataclass
class Sampling:
    """How tokens are drawn. mode is static, so that plain sampling and greedy pay for no filter."""

    temperature: Array  # [] float32
    top_p: Array  # [] float32, 1 is off
    top_k: Array  # [] int32, 0 is off
    min_p: Array  # [] float32, 0 is off
    mode: Mode = struct.field(pytree_node=False)


def sampling(temperature: float = 1.0, top_p: float = 1.0, top_k: int = 0, min_p: float = 0.0) -> Sampling:
    """A validated Sampling; temperature 0 is greedy. Raises UserError for values outside their range."""
    if temperature < 0:
        raise UserError(f"temperature must be at least 0 (0 is greedy), got {temperature}")
    if not 0 < top_p <= 1:
        raise UserError(f"top_p must be above 0 and at most 1 (1 is off), got {top_p}")
    if top_k < 0:
        raise UserError(f"top_k must be at least 0 (0 is off), got {top_k}")
    if not 0 <= min_p <= 1:
        raise UserError(f"min_p must lie between 0 (off) and 1, got {min_p}")
    filtered = top_p < 1 or top_k > 0 or min_p > 0
    mode: Mode = "greedy" if temperature == 0 else "filtered" if filtered else "plain"
    return Sampling(
        temperature=jnp.float32(temperature or 1.0),
        top_p=jnp.float32(top_p),
        top_k=jnp.int32(top_k),
        min_p=jnp.float32(min_p),
        mode=mode,
    )


def draw(logits: Array, keys: Array, settings: Sampling, vocab_size: int) -> tuple[Array, Array]:
    """One id per row and its log-prob in the distribution it was drawn from.

    logits [S, V] float32; keys [S], one random key per row; ids from vocab_size up have no probability. Greedy takes
    the first of the largest logits and gives its log-prob at temperature 1 (its own would be 0).
    Returns (id [S] int32, log-prob [S] float32).
    """
    scores = distribution(logits, settings, vocab_size)
    top, mass = _masses(scores)
    if settings.mode == "greedy":
        token = _first_best(scores)
    else:
        gumbel = _gumbel(keys, mass.shape[1])
        block = jnp.argmax(block_scores(mass, gumbel), axis=-1)
        token = block * BLOCK + jnp.argmax(id_scores(scores, block, gumbel), axis=-1)
    total = top + jnp.log(jnp.sum(mass, axis=-1))
    logprob = jnp.take_along_axis(scores.reshape(scores.shape[0], -1), token[:, None], axis=1)[:, 0] - total
    return token.astype(jnp.int32), logprob


def distribution(logits: Array, settings: Sampling, vocab_size: int) -> Array:
    """Scores whose softmax is the distribution drawn from, in blocks: [S, ceil(V / 128), 128] float32, -inf for ids
    that cannot be drawn. Order of the filters as in transformers: temperature, top-k, top-p, min-p."""
    rows, width = logits.shape
    scores = logits.astype(jnp.float32)
    if settings.mode != "greedy":
        scores = scores / settings.temperature
    if width > vocab_size:
        scores = jnp.where(jnp.arange(width) < vocab_size, scores, -jnp.inf)
    if settings.mode == "filtered":
        scores = _filter(scores, settings)
    scores = jnp.pad(scores, ((0, 0), (0, -width % BLOCK)), constant_values=-jnp.inf)
    return scores.reshape(rows, -1, BLOCK)


def gaps(scores: Array, keys: Array) -> Array:
    """[S]: by how much the best perturbed score leads, the smaller of both levels: two computations of the same logits
    may draw different ids only where this is of the size of their difference. scores as from ``distribution``."""
    _, mass = _masses(scores)
    gumbel = _gumbel(keys, mass.shape[1])
    blocks = jnp.pad(block_scores(mass, gumbel), ((0, 0), (0, 1)), constant_values=-jnp.inf)
    within = id_scores(scores, jnp.argmax(blocks, axis=-1), gumbel)
    leads = [jax.lax.top_k(level, 2)[0] for level in (blocks, within)]
    return jnp.minimum(*(lead[:, 0] - lead[:, 1] for lead in leads))


def block_scores(mass: Array, gumbel: Array) -> Array:
    """Perturbed log-mass of each block: [S, blocks]."""
    return jnp.log(mass) + gumbel[:, : mass.shape[1]]


def id_scores(scores: Array, block: Array, gumbel: Array) -> Array:
    """Perturbed scores of the ids of one block per row: [S, 128]."""
    return jnp.take_along_axis(scores, block[:, None, None], axis=1)[:, 0] + gumbel[:, -BLOCK:]


def _masses(scores: Array) -> tuple[Array, Array]:
    """(largest score [S], sum of exp(score - largest) in each block [S, blocks])."""
    top = jnp.max(scores, axis=(1, 2))
    return top, jnp.sum(jnp.exp(scores - top[:, None, None]), axis=-1)


def _gumbel(keys: Array, blocks: int) -> Array:
    return jax.vmap(lambda key: jax.random.gumbel(key, (blocks + BLOCK,)))(keys)


def _first_best(scores: Array) -> Array:
    # By blocks: XLA's argmax over a whole row is fifteen times slower than its max.
    block = jnp.argmax(jnp.max(scores, axis=-1), axis=-1)
    return block * BLOCK + jnp.argmax(jnp.take_along_axis(scores, block[:, None, None], axis=1)[:, 0], axis=-1)


def _filter(scores: Array, settings: Sampling) -> Array:
    """-inf below the thresholds of top-k, top-p (of what top-k left) and min-p. Ids that tie with the last one kept
    stay too. Without a sort: the thresholds are bisected on the bits of the scores."""
    ordered = _ordered_bits(scores)
    k = jnp.where(settings.top_k > 0, settings.top_k, scores.shape[1])
    limit = _largest(lambda bound: jnp.sum(ordered >= bound[:, None], axis=-1) >= k, scores.shape[0])
    ordered = jnp.where(ordered >= limit[:, None], ordered, 0)
    top = jnp.max(scores, axis=-1, keepdims=True)
    weight = jnp.where(ordered > 0, jnp.exp(scores - top), 0.0)
    needed = settings.top_p * jnp.sum(weight, axis=-1)
    limit = _largest(
        lambda bound: jnp.sum(jnp.where(ordered >= bound[:, None], weight, 0.0), axis=-1) >= needed, scores.shape[0]
    )
    nucleus = (ordered >= limit[:, None]) | (settings.top_p >= 1)
    return jnp.where((ordered > 0) & nucleus & (weight >= settings.min_p), scores, -jnp.inf)


def _ordered_bits(x: Array) -> Array:
    """uint32 in the order of the floats."""
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    return jnp.where(bits & sign, ~bits, bits | sign)


def _largest(holds, rows: int) -> Array:
    """The largest uint32 bound per row for which ``holds`` (true up to some bound, false above): [rows]."""

    def narrow(i: Array, bound: Array) -> Array:
        candidate = bound | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(candidate), candidate, bound)

    return jax.lax.fori_loop(0, 32, narrow, jnp.zeros(rows, jnp.uint32))
