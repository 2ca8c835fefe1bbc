"""Grouped-query attention: over one row (training, prefill) and over a cache (decode). Softmax is float32."""

from __future__ import annotations

from functools import reduce
from itertools import pairwise
from operator import add
from typing import Literal

import jax
import jax.numpy as jnp

from hacrl_jax import sharding
from hacrl_jax.models import splash
from hacrl_jax.types import Array

Implementation = Literal["xla", "splash", "unrolled"]
"""splash is a kernel for TPU (causal), unrolled a form for CPU (over a cache)."""
BLOCKS, SHORTEST = 4, 48  # blocks of a row's queries at most, and queries of a block at least
MASKED = -1e30  # finite, so that a row with every key masked stays finite
TERMS = 8  # of one unrolled sum at most


def causal(
    q: Array,
    k: Array,
    v: Array,
    segment: Array | None,
    implementation: Implementation = "xla",
    queries: Array | None = None,
) -> Array:
    """Each token attends to itself and what precedes it in its segment.

    q [B, S, H, h], of the last S of T tokens; k, v [B, T, K, h]; segment [B, T] or None (a row is one sequence). Tokens
    of segment 0 (padding) attend to one another, which keeps their rows finite and touches no other. "splash" is the
    TPU's kernel (splash.py; S = T). With queries [B, S], q belongs to these of the T tokens ("xla" only). Returns q's
    shape.
    """
    if queries is not None:
        visible = queries[:, :, None] >= jnp.arange(k.shape[1])  # [B, S, T]
        if segment is not None:
            visible &= jnp.take_along_axis(segment, queries, axis=1)[:, :, None] == segment[:, None, :]
        return jax.nn.dot_product_attention(q, k, v, mask=visible[:, None], implementation="xla")
    if implementation == "splash":
        return splash.causal(q, k, v, segment)
    # In blocks, each of which meets the keys up to its own end: those that no query of it sees would cost as much as
    # the others (at T = 192 the forward and backward pass took 0.6 of the time on CPU).
    t, before = q.shape[1], k.shape[1] - q.shape[1]
    count = max(1, min(BLOCKS, t // SHORTEST))
    ends = [-(-t * i // count) for i in range(1, count + 1)]
    mixed = []
    # split: its gradient is one concatenation, that of four slices four padded arrays and their sum.
    for block, bounds in zip(jnp.split(q, ends[:-1], axis=1), pairwise((0, *ends)), strict=True):
        start, end = (before + bound for bound in bounds)
        visible = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None, None]  # [1, 1, t, s]
        if segment is not None:
            visible = visible & (segment[:, None, start:end, None] == segment[:, None, None, :end])
        mixed.append(jax.nn.dot_product_attention(block, k[:, :end], v[:, :end], mask=visible, implementation="xla"))
    return jnp.concatenate(mixed, axis=1)


def answers(q: Array, k: Array, v: Array, segment: Array, prompt: int, count: int) -> Array:
    """As ``causal`` where a row is a prompt of `prompt` tokens and then `count` answers to it, all of one length: an
    answer attends to the prompt and to itself.

    q [B, T, H, h], or [B, T - prompt, H, h] of the answers alone; k, v [B, T, K, h]; segment [B, T], 0 is padding.
    Returns q's shape.
    """
    b, t = segment.shape

    def apart(x: Array) -> Array:  # [B * count, R, ...]: the answers
        return x[:, x.shape[1] - t + prompt :].reshape(b * count, -1, *x.shape[2:])

    def behind(x: Array) -> Array:  # [B * count, prompt + R, ...]: each with its own copy of the prompt
        return jnp.concatenate([jnp.repeat(x[:, :prompt], count, axis=0), apart(x)], axis=1)

    mixed = causal(apart(q), behind(k), behind(v), behind(segment)).reshape(b, t - prompt, *q.shape[2:])
    if q.shape[1] < t:
        return mixed
    first = causal(*(x[:, :prompt] for x in (q, k, v, segment)))
    return jnp.concatenate([first, mixed], axis=1)


def cached(q: Array, k: Array, v: Array, cache: tuple[Array, Array], length: Array, segment: Array | None) -> Array:
    """New tokens attend to the live cache entries and causally to themselves; nothing is concatenated or written.

    q [B, T, H, h]; k, v [B, T, K, h]; cache two of [B, C, K * h]; length [B]: entries below it are live; segment as in
    causal, for the new tokens among themselves. Returns [B, T, H, h].
    """
    b, t, heads, h = q.shape
    parts = sharding.parts("kv_heads", k.shape[2])  # P: the flat axis lies in so many parts, on as many devices
    group = k.shape[2] // parts  # kv heads of a part
    # A query is laid at its kv head's place in its part's flat axis, zero elsewhere: more products, which a decode step
    # has to spare, and the cache is read as it lies. Split into heads, the TPU compiler copied and transposed every
    # layer's cache (0.8 GB of buffers against 0.3 MB: Qwen3-0.6B, 64 slots of 2,048), and XLA's CPU backend was slower.
    own = jnp.arange(heads // parts)[:, None] // (heads // k.shape[2]) == jnp.arange(group)  # [H / P, K / P]
    own = own[:, :, None]
    q = q.reshape(b, t, parts, -1, 1, h)
    wide = jnp.where(own, q, 0).reshape(b, t, parts, heads // parts, -1)  # [B, T, P, H / P, K / P * h]
    pairs = [(part.astype(q.dtype), new.reshape(b, t, -1)) for part, new in zip(cache, (k, v), strict=True)]
    keys, values = ([part.reshape(b, part.shape[1], parts, -1) for part in pair] for pair in pairs)  # [B, C | T, P, ..]
    live = jnp.arange(keys[0].shape[1]) < length[:, None]  # [B, C]
    visible = jnp.tril(jnp.ones((t, t), bool))[None]  # [1, T, T]
    if segment is not None:
        visible = visible & (segment[:, :, None] == segment[:, None, :])
    scores = []  # [B, P, C, T, H / P] and [B, P, T, T, H / P]: keys first, which XLA's CPU backend multiplies fastest
    for part, mask in zip(keys, (live[:, :, None], visible.swapaxes(1, 2)), strict=True):
        score = jnp.einsum("bspd,btpnd->bpstn", part, wide, preferred_element_type=jnp.float32)
        scores.append(jnp.where(mask[:, None, ..., None], score * h**-0.5, MASKED))
    top = jnp.maximum(*(jnp.max(score, axis=2, keepdims=True) for score in scores))
    weights = [jnp.exp(score - top) for score in scores]
    total = sum(jnp.sum(weight, axis=2) for weight in weights)  # [B, P, T, H / P]
    mixed = sum(
        jnp.einsum("bpstn,bspd->bptnd", weight.astype(q.dtype), value, preferred_element_type=jnp.float32)
        for weight, value in zip(weights, values, strict=True)
    )
    mixed = (mixed / total[..., None]).reshape(b, parts, t, heads // parts, group, h)
    mixed = jnp.sum(jnp.where(own, mixed, 0), axis=4)  # [B, P, T, H / P, h]
    return jnp.moveaxis(mixed, 1, 2).astype(q.dtype).reshape(b, t, heads, h)


def entry_axes(implementation: Implementation) -> tuple[int, int]:
    """Along which axis of the cache's keys, and of its values, the entries lie: [B, C, K * h] or [B, K * h, C]."""
    return (2, 1) if implementation == "unrolled" else (1, 1)


def unrolled(q: Array, k: Array, v: Array, cache: tuple[Array, Array], length: Array) -> Array:
    """As ``cached`` for one new token (T = 1) over a cache of keys [B, K * h, C] and values [B, C, K * h].

    XLA's CPU backend gives products this thin to a library that runs them on one core, at a third of the memory's rate.
    Sums of elementwise products with a long minor axis become vector loops over all cores: with 64 rows of 192 entries,
    4 heads of 64, two cores, attention took half the time.
    """
    b, t, heads, h = q.shape
    if t != 1:
        raise ValueError(f"one new token per row, got {t}")
    kv, (keys, values) = k.shape[2], cache
    c, wide = values.shape[1], jnp.float32
    q = q.reshape(b, kv, -1, h).astype(wide)  # [B, K, H / K, h]
    own = jnp.sum(q * k.reshape(b, kv, 1, h).astype(wide), axis=3, keepdims=True) * h**-0.5  # [B, K, H / K, 1]

    def score() -> Array:
        scores = _contract(keys.astype(wide).reshape(b, kv, 1, h, c), q[..., None], 3)  # [B, K, H / K, C]
        return jnp.where((jnp.arange(c) < length[:, None])[:, None, None], scores * h**-0.5, MASKED)

    # Always the first branch (no length is negative): XLA does not merge what is in it with what follows. Else it would
    # compute the scores twice, for the largest and for the weights.
    scores = jax.lax.cond(length[0] >= 0, score, lambda: jnp.zeros((b, kv, heads // kv, c), wide))
    top = jnp.maximum(jnp.max(scores, axis=3, keepdims=True), own)
    weights, own = jnp.exp(scores - top), jnp.exp(own - top)
    total = jnp.sum(weights, axis=3, keepdims=True) + own
    by_entry = jnp.moveaxis(weights, 3, 1)[..., None]  # [B, C, K, H / K, 1]
    mixed = _contract(values.astype(wide).reshape(b, c, kv, 1, h), by_entry, 1)  # [B, K, H / K, h]
    mixed = (mixed + own * v.reshape(b, kv, 1, h).astype(wide)) / total
    return mixed.reshape(b, 1, heads, h).astype(k.dtype)


def _contract(x: Array, y: Array, axis: int) -> Array:
    """sum(x * y, axis), as a tree of sums of a few slices each."""

    def slices(part: Array) -> list[Array]:
        size = part.shape[axis]
        return jnp.split(part, next((count for count in range(TERMS, 1, -1) if size % count == 0), size), axis)

    total = reduce(add, (a * b for a, b in zip(slices(x), slices(y), strict=True)))
    while total.shape[axis] > 1:
        total = reduce(add, slices(total))
    return total.squeeze(axis)
