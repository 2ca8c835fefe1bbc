"""Token log-probs and entropy from hidden states, a block of the vocabulary at a time: no [M, N, V] array exists.

The forward pass keeps, per token, a running maximum and sums over the blocks (as in Milakov and Gimelshein, 2018); the
backward pass knows the normalizer, so that each block's part of the head's gradient is computed once and complete.

Extra letters: t tokens, P devices that share the vocabulary, b ids of a block on one of them, C blocks.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hacrl_jax.sharding import constrain, parts
from hacrl_jax.types import Array

LOWEST = -1e30  # finite: the maximum over ids that have no probability


@dataclass(frozen=True)
class Softmax:
    """What is static about the distribution softmax(hidden @ head.T / temperature)."""

    vocab_size: int  # rows of the head from here up have no probability
    temperature: float
    chunk: int  # ids whose logits exist at one time, on each device
    dtype: Any  # of the products, which are summed in float32

    def product(self, equation: str, a: Array, b: Array) -> Array:
        precision = "highest" if self.dtype == jnp.float32 else None  # TPUs and GPUs use fewer bits unless told
        operands = a.astype(self.dtype), b.astype(self.dtype)
        return jnp.einsum(equation, *operands, precision=precision, preferred_element_type=jnp.float32)

    def logits(self, block: Block, x: Array) -> Array:  # [t, P, b]
        logits = self.product("td,vd->tv", x, _rows(block.head)).reshape(-1, *block.ids.shape)
        logits = jnp.where(block.ids < self.vocab_size, logits / self.temperature, -jnp.inf)
        return constrain(logits, "batch", "vocab", None)


class Block(NamedTuple):
    """Blocks [C, ...] to scan over, or one of them."""

    head: Array  # [P, b, D]
    ids: Array  # [P, b] int32; padding has ids that no tokenizer has


def head_logprobs(
    head: Array, hidden: Array, target: Array, vocab_size: int, temperature: float, chunk: int
) -> tuple[Array, Array]:
    """log softmax(hidden @ head.T / temperature)[target] and the entropy in nats, each float32 [M, N].

    head [V, D] float32, of which rows from vocab_size up have no probability; hidden [M, N, D], in whose dtype the
    products are taken; target [M, N] int32. Logits of at most `chunk` ids per device exist at one time. On a mesh rows
    stay where they are and the vocabulary is split over tensor. No gradient comes from the entropy.
    """
    space = Softmax(vocab_size, temperature, chunk, hidden.dtype)
    logprob, entropy = _both(space, head, _rows(hidden), target.reshape(-1))
    return logprob.reshape(target.shape), entropy.reshape(target.shape)


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _both(space: Softmax, head: Array, x: Array, target: Array) -> tuple[Array, Array]:
    """(log-prob, entropy), each [t]; x [t, D], target [t]."""
    return _forward(space, head, x, target)[0]


def _forward(space: Softmax, head: Array, x: Array, target: Array) -> tuple[tuple[Array, Array], tuple[Array, ...]]:
    """What _both gives, and what the backward pass needs."""

    def one(carry: tuple[Array, ...], block: Block) -> tuple[tuple[Array, ...], None]:
        top, total, weighted, wanted = carry  # [t, P] each: devices meet once, after the last block
        logits = space.logits(block, x)
        higher = jnp.maximum(top, jnp.max(logits, axis=-1))
        shrunk, weight = jnp.exp(top - higher), jnp.exp(logits - higher[..., None])
        finite = jnp.where(block.ids < space.vocab_size, logits, 0.0)
        # einsum, because XLA's CPU backend takes 20 times as long for the sum of a product over [t, 1, b].
        weighted = weighted * shrunk + jnp.einsum("tpv,tpv->tp", weight, finite, precision="highest")
        total = total * shrunk + weight.sum(-1)
        # A masked sum: a gather would fetch the whole vocabulary from the devices that share it.
        wanted += jnp.sum(jnp.where(block.ids == target[:, None, None], finite, 0.0), axis=-1)
        return (higher, total, weighted, wanted), None

    blocks = _blocks(head, space.chunk)
    zeros = constrain(jnp.zeros((x.shape[0], blocks.head.shape[1])), "batch", "vocab")
    (top, total, weighted, wanted), _ = jax.lax.scan(one, (zeros + LOWEST, zeros, zeros, zeros), blocks)
    highest = jnp.max(top, axis=-1)
    scale = jnp.exp(top - highest[:, None])
    total = jnp.sum(total * scale, axis=-1)
    normalizer = highest + jnp.log(total)
    entropy = normalizer - jnp.sum(weighted * scale, axis=-1) / total
    return (wanted.sum(-1) - normalizer, entropy), (head, x, target, normalizer)


def _backward(space: Softmax, kept: tuple[Array, ...], cotangent: tuple[Array, Array]) -> tuple[Array, Array, None]:
    head, x, target, normalizer = kept
    slope = (cotangent[0] / space.temperature)[:, None, None]

    def one(total: Array, block: Block) -> tuple[Array, Array]:
        probability = jnp.exp(space.logits(block, x) - normalizer[:, None, None])
        d_logits = slope * ((block.ids == target[:, None, None]) - probability)
        d_block = space.product("tv,td->vd", d_logits.reshape(x.shape[0], -1), x).reshape(block.head.shape)
        # Summed over the blocks where the vocabulary lies, and over these devices once, at the end.
        total += space.product("tpv,pvd->ptd", d_logits, block.head)
        return constrain(total, "vocab", "batch", None), constrain(d_block, "vocab", None, "embed")

    blocks = _blocks(head, space.chunk)
    zeros = constrain(jnp.zeros((blocks.head.shape[1], *x.shape)), "vocab", "batch", None)
    d_x, d_blocks = jax.lax.scan(one, zeros, blocks)
    d_head = jnp.moveaxis(d_blocks, 0, 1).reshape(d_blocks.shape[1], -1, head.shape[1])  # [P, C * b, D]
    d_head = d_head[:, : head.shape[0] // d_head.shape[0]].reshape(head.shape)
    return d_head.astype(head.dtype), d_x.sum(0).astype(x.dtype), None


_both.defvjp(_forward, _backward)


def _blocks(head: Array, chunk: int) -> Block:
    """The vocabulary in blocks of at most `chunk` ids on each of the devices that share it."""
    head = constrain(head, "vocab", None)  # gathered over fsdp once, not in every block
    shared = parts("vocab", head.shape[0])
    rows = head.shape[0] // shared
    count = -(-rows // chunk)
    # A few more blocks, if these divide the rows: padding copies the whole head.
    count = next((more for more in range(count, 2 * count) if rows % more == 0), count)
    size = -(-rows // count)
    pad = size * count - rows
    ids = jnp.arange(head.shape[0], dtype=jnp.int32).reshape(shared, rows)
    ids = jnp.pad(ids, ((0, 0), (0, pad)), constant_values=jnp.iinfo(jnp.int32).max)
    cut = jnp.pad(head.reshape(shared, rows, -1), ((0, 0), (0, pad), (0, 0)))
    cut = jnp.moveaxis(cut.reshape(shared, count, size, -1), 1, 0)
    return Block(constrain(cut, None, "vocab", None, None), jnp.moveaxis(ids.reshape(shared, count, size), 1, 0))


def _rows(x: Array) -> Array:
    """[a, b, ...] -> [a * b, ...]."""
    return x.reshape(-1, *x.shape[2:])
