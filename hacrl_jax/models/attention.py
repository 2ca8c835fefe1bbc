"""Grouped-query attention: over one row (training, prefill) and over a cache (decode). Softmax is float32."""

from __future__ import annotations

from typing import Literal

import jax
import jax.numpy as jnp

from hacrl_jax.types import Array

Implementation = Literal["xla", "splash"]
MASKED = -1e30  # finite, so that a row with every key masked stays finite


def causal(q: Array, k: Array, v: Array, segment: Array | None, implementation: Implementation = "xla") -> Array:
    """Each token attends to itself and what precedes it in its segment.

    q [B, T, H, h]; k, v [B, T, K, h]; segment [B, T] or None (a row is one sequence). Tokens of segment 0 (padding)
    attend to one another, which keeps their rows finite and touches no other. Returns [B, T, H, h].
    """
    mask = None if segment is None else (segment[:, None, :, None] == segment[:, None, None, :])  # [B, 1, T, T]
    return jax.nn.dot_product_attention(q, k, v, mask=mask, is_causal=True, implementation="xla")


def cached(q: Array, k: Array, v: Array, cache: tuple[Array, Array], length: Array, segment: Array | None) -> Array:
    """New tokens attend to the live cache entries and causally to themselves; nothing is concatenated or written.

    q [B, T, H, h]; k, v [B, T, K, h]; cache two of [B, C, K * h]; length [B]: entries below it are live; segment as in
    causal, for the new tokens among themselves. Returns [B, T, H, h].
    """
    b, t, _, h = q.shape
    kv_heads = k.shape[2]
    old_k, old_v = (part.astype(q.dtype).reshape(b, -1, kv_heads, h) for part in cache)  # [B, C, K, h]
    q = q.reshape(b, t, kv_heads, -1, h)  # [B, T, K, H / K, h]
    scores = [jnp.einsum("btkgh,bskh->bkgts", q, keys, preferred_element_type=jnp.float32) for keys in (old_k, k)]
    live = jnp.arange(old_k.shape[1]) < length[:, None]  # [B, C]
    visible = jnp.tril(jnp.ones((t, t), bool))[None]  # [1, T, T]
    if segment is not None:
        visible = visible & (segment[:, :, None] == segment[:, None, :])
    scores = [
        jnp.where(live[:, None, None, None, :], scores[0] * h**-0.5, MASKED),  # [B, K, H / K, T, C]
        jnp.where(visible[:, None, None], scores[1] * h**-0.5, MASKED),  # [B, K, H / K, T, T]
    ]
    top = jnp.maximum(*(jnp.max(part, axis=-1, keepdims=True) for part in scores))
    weights = [jnp.exp(part - top) for part in scores]
    total = sum(jnp.sum(part, axis=-1) for part in weights)  # [B, K, H / K, T]
    mixed = sum(
        jnp.einsum("bkgts,bskh->btkgh", part.astype(q.dtype), values, preferred_element_type=jnp.float32)
        for part, values in zip(weights, (old_v, v), strict=True)
    )
    return (mixed / jnp.moveaxis(total, 3, 1)[..., None]).astype(q.dtype).reshape(b, t, -1, h)
