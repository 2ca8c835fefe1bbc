"""Grouped-query attention: over one row (training, prefill) and over a cache (decode). Softmax is float32."""

from __future__ import annotations

from itertools import pairwise
from typing import Literal

import jax
import jax.numpy as jnp

from hacrl_jax import sharding
from hacrl_jax.models import splash
from hacrl_jax.types import Array

Implementation = Literal["xla", "splash"]
BLOCKS, SHORTEST = 4, 48  # blocks of a row's queries at most, and queries of a block at least
MASKED = -1e30  # finite, so that a row with every key masked stays finite


def causal(q: Array, k: Array, v: Array, segment: Array | None, implementation: Implementation = "xla") -> Array:
    """Each token attends to itself and what precedes it in its segment.

    q [B, T, H, h]; k, v [B, T, K, h]; segment [B, T] or None (a row is one sequence). Tokens of segment 0 (padding)
    attend to one another, which keeps their rows finite and touches no other. "splash" is the TPU's kernel (splash.py).
    Returns [B, T, H, h].
    """
    if implementation == "splash":
        return splash.causal(q, k, v, segment)
    # In blocks, each of which meets the keys up to its own end: those that no query of it sees would cost as much as
    # the others (at T = 192 the forward and backward pass took 0.6 of the time on CPU).
    t = q.shape[1]
    count = max(1, min(BLOCKS, t // SHORTEST))
    ends = [-(-t * i // count) for i in range(1, count + 1)]
    mixed = []
    for start, end in pairwise((0, *ends)):
        visible = (jnp.arange(start, end)[:, None] >= jnp.arange(end))[None, None]  # [1, 1, t, s]
        if segment is not None:
            visible = visible & (segment[:, None, start:end, None] == segment[:, None, None, :end])
        mixed.append(
            jax.nn.dot_product_attention(q[:, start:end], k[:, :end], v[:, :end], mask=visible, implementation="xla")
        )
    return jnp.concatenate(mixed, axis=1)


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
