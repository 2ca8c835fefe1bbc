"""Token log-probs and entropy from hidden states, a block of the vocabulary at a time: no [M, N, V] array exists.

The forward pass keeps, per token, a running maximum and sums over the blocks (as in Milakov and Gimelshein, 2018); the
backward pass knows the normalizer, so that each block's part of the head's gradient is computed once and complete.

Extra letters: t tokens, P devices that share the vocabulary, v ids that each of them has, b ids of a block on one.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hacrl_jax.sharding import constrain, parts
from hacrl_jax.types import Array

LOWEST = -1e30  # finite: the maximum over ids that have no probability
LOGITS = 2**24  # of a block on one device at most: more tokens make smaller blocks
SMALLEST = 128  # ids of a block


@dataclass(frozen=True)
class Softmax:
    """What is static about the distribution softmax(hidden @ head.T / temperature)."""

    vocab_size: int  # rows of the head from here up have no probability
    temperature: float
    chunk: int  # ids whose logits exist at one time at most, on each device
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
    """Part of the vocabulary: b ids of each device."""

    start: Array  # [] the first of its v ids
    head: Array  # [P, b, D]
    ids: Array  # [P, b] int32; those that belong to another block are ids that no tokenizer has


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

    table = _table(space, head)
    size, starts = _blocks(space, table, x)

    def one(carry: tuple[Array, ...], start: Array) -> tuple[tuple[Array, ...], None]:
        top, total, weighted, wanted = carry  # [t, P] each: devices meet once, after the last block
        block = _block(table, size, *start)
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

    zeros = constrain(jnp.zeros((x.shape[0], table.shape[0])), "batch", "vocab")
    (top, total, weighted, wanted), _ = jax.lax.scan(one, (zeros + LOWEST, zeros, zeros, zeros), starts)
    highest = jnp.max(top, axis=-1)
    scale = jnp.exp(top - highest[:, None])
    total = jnp.sum(total * scale, axis=-1)
    normalizer = highest + jnp.log(total)
    entropy = normalizer - jnp.sum(weighted * scale, axis=-1) / total
    return (wanted.sum(-1) - normalizer, entropy), (head, x, target, normalizer)


def _backward(space: Softmax, kept: tuple[Array, ...], cotangent: tuple[Array, Array]) -> tuple[Array, Array, None]:
    head, x, target, normalizer = kept
    slope = (cotangent[0] / space.temperature)[:, None, None]

    table = _table(space, head)
    size, starts = _blocks(space, table, x)

    def one(carry: tuple[Array, Array], start: Array) -> tuple[tuple[Array, Array], None]:
        d_table, d_x = carry
        block = _block(table, size, *start)
        probability = jnp.exp(space.logits(block, x) - normalizer[:, None, None])
        d_logits = slope * ((block.ids == target[:, None, None]) - probability)
        d_block = space.product("tv,td->vd", d_logits.reshape(x.shape[0], -1), x).reshape(block.head.shape)
        d_block = constrain(d_block, "vocab", None, "embed")
        # Summed over the blocks where the vocabulary lies, and over these devices once, at the end.
        d_x += space.product("tpv,pvd->ptd", d_logits, block.head)
        d_table = jax.lax.dynamic_update_slice_in_dim(d_table, d_block, block.start, 1)
        return (constrain(d_table, "vocab", None, "embed"), constrain(d_x, "vocab", "batch", None)), None

    d_table = constrain(jnp.zeros(table.shape), "vocab", None, "embed")
    d_x = constrain(jnp.zeros((table.shape[0], *x.shape)), "vocab", "batch", None)
    (d_table, d_x), _ = jax.lax.scan(one, (d_table, d_x), starts)
    return _rows(d_table).astype(head.dtype), d_x.sum(0).astype(x.dtype), None


_both.defvjp(_forward, _backward)


def _table(space: Softmax, head: Array) -> Array:
    """The head [P, v, D] in the products' dtype: gathered over fsdp once, and not in every block."""
    head = constrain(head.astype(space.dtype), "vocab", None)
    return head.reshape(parts("vocab", head.shape[0]), -1, head.shape[1])


def _blocks(space: Softmax, table: Array, x: Array) -> tuple[int, tuple[Array, Array]]:
    """(b, for each block: its first row, and the first row that is its own).

    Blocks that do not divide the rows overlap, because padding would copy the whole head. The last one comes first: the
    gradient of the rows that it shares is then written anew by the block to which they belong.
    """
    rows, tokens = table.shape[1], x.shape[0] // parts("batch", x.shape[0])
    count = -(-rows // min(space.chunk, max(LOGITS // tokens, SMALLEST), rows))
    size = -(-rows // count)
    own = np.arange(count - 1, 2 * count - 1) % count * size
    return size, (jnp.asarray(np.minimum(own, rows - size), jnp.int32), jnp.asarray(own, jnp.int32))


def _block(table: Array, size: int, start: Array, own: Array) -> Block:
    rows = start + jnp.arange(size)
    first = jnp.arange(table.shape[0])[:, None] * table.shape[1]  # the first id of each device
    ids = jnp.where(rows >= own, first + rows, jnp.iinfo(jnp.int32).max)
    return Block(start, jax.lax.dynamic_slice_in_dim(table, start, size, 1), ids)


def _rows(x: Array) -> Array:
    """[a, b, ...] -> [a * b, ...]."""
    return x.reshape(-1, *x.shape[2:])
