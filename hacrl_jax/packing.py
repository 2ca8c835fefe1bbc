"""Several sequences in one row: packing, so that a ragged batch costs its tokens and not its padding, and the answers
to one prompt behind it, so that it is computed once.

Packing is decided on the device from the lengths, with static shapes: as many rows as there are sequences, of which the
first ones fill up. The learner's loop stops after the last used one.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from hacrl_jax.types import Array, Minibatch

SHORTEST = 16  # a row has a slot for each so many tokens, and at least four


class Places(NamedTuple):
    """Where sequence i went, each [M] int32: its tokens to row[i] from offset[i], its values to slot[i]. row is M for
    a sequence that takes no part."""

    row: Array
    offset: Array
    slot: Array
    used: Array  # [] rows in use


class Answers(NamedTuple):
    """What the decoder reads of M rows in groups of g, each of one prompt: a row is the prompt and g answers to it.

    An answer starts with the prompt's last token, which predicts its first one, and goes without its own last one.
    """

    tokens: Array  # [M / g, P + g * R] int32
    positions: Array  # [M / g, P + g * R] int32
    segment: Array  # [M / g, P + g * R] int32, 1, or 0 for padding
    at: Array  # [M, R] int32: where a row holds the tokens that the answer's hidden states predict


def behind_prompts(rows: Minibatch, group: int, responses: int) -> Answers:
    """Rows of one sequence each, of which every `group` in turn have one prompt. responses: R, so that P = T - R."""
    M, T = rows.tokens.shape
    # In a row that takes part, what is not scored is the prompt.
    length = jnp.sum((rows.segment > 0) & ~rows.scored, axis=1, dtype=jnp.int32)
    length = jnp.minimum(length.reshape(-1, group).min(axis=1), T - responses)  # [M / g]
    at = jnp.repeat(length, group)[:, None] + jnp.arange(responses)  # [M, R]

    def row(prompt: Array, answer: Array) -> Array:
        return jnp.concatenate([prompt[::group, : T - responses], answer.reshape(M // group, -1)], axis=1)

    own = lambda x, where: jnp.take_along_axis(x, where, axis=1)  # noqa: E731
    inside = jnp.broadcast_to(jnp.arange(T) < jnp.repeat(length, group)[:, None] - 1, (M, T))
    return Answers(
        tokens=row(rows.tokens, own(rows.tokens, at - 1)),
        positions=row(rows.positions, own(rows.positions, at - 1)),
        segment=row(inside, own(rows.segment > 0, at)).astype(jnp.int32),
        at=at,
    )  # fmt: skip


def slots_of(length: int) -> int:
    """S, the most sequences that a row of `length` tokens takes."""
    return max(4, length // SHORTEST)


def place(lengths: Array, row_length: int) -> Places:
    """First fit in decreasing order of length. lengths [M] int32 of at most row_length; 0 takes no part."""
    M, slots = lengths.shape[0], slots_of(row_length)
    order = jnp.argsort(-lengths, stable=True)

    def one(state: tuple[Array, Array], i: Array):
        filled, count = state  # [M] tokens and sequences of each row
        length = lengths[i]
        row = jnp.argmax((filled + length <= row_length) & (count < slots))
        taken = (row, filled[row], count[row])
        present = length > 0
        return (filled.at[row].add(length), count.at[row].add(present.astype(jnp.int32))), taken

    zeros = jnp.zeros(M, jnp.int32)
    (_, count), (row, offset, slot) = jax.lax.scan(one, (zeros, zeros), order)
    back = jnp.zeros_like(order).at[order].set(jnp.arange(M, dtype=order.dtype))
    row = jnp.where(lengths > 0, row[back].astype(jnp.int32), M)
    return Places(row, offset[back], slot[back], jnp.sum(count > 0, dtype=jnp.int32))


def pack(rows: Minibatch, places: Places) -> Minibatch:
    """Rows of one sequence each ([M, T] and [M, 1]) as packed rows: [M, T] and [M, S]."""
    M, T = rows.tokens.shape
    target = _flat(places, T)  # [M, T]
    kept = rows.segment > 0

    def tokens(x: Array) -> Array:
        return jnp.zeros(M * T, x.dtype).at[jnp.where(kept, target, M * T)].set(x, mode="drop").reshape(M, T)

    def sequences(x: Array) -> Array:
        return jnp.zeros((M, slots_of(T)), x.dtype).at[places.row, places.slot].set(x[:, 0], mode="drop")

    segment = jnp.broadcast_to(places.slot[:, None] + 1, (M, T))
    return Minibatch(
        tokens=tokens(rows.tokens), positions=tokens(rows.positions), segment=tokens(segment),
        scored=tokens(rows.scored),
        source_token_logprob=tokens(rows.source_token_logprob),
        sampler_token_logprob=tokens(rows.sampler_token_logprob),
        reference_token_logprob=tokens(rows.reference_token_logprob),
        source_logprob=sequences(rows.source_logprob), advantage=sequences(rows.advantage),
        capability_ratio=sequences(rows.capability_ratio), source=sequences(rows.source), valid=sequences(rows.valid),
    )  # fmt: skip


def unpack_tokens(values: Array, places: Places, kept: Array) -> Array:
    """Token values [M, T] of packed rows back to one sequence a row; 0 where kept [M, T] is False."""
    M, T = values.shape
    target = jnp.minimum(_flat(places, T), M * T - 1)
    return jnp.where(kept, values.reshape(-1)[target], 0)


def unpack_sequences(values: Array, places: Places) -> Array:
    """Values of sequences [M, S] of packed rows back to [M, 1]; 0 for a sequence that took no part."""
    return values.at[places.row, places.slot].get(mode="fill", fill_value=0)[:, None]


def lengths_of(rows: Minibatch) -> Array:
    """Tokens of every sequence, 0 for those that take no part: [M]."""
    return jnp.where(rows.valid[:, 0], jnp.sum(rows.segment > 0, axis=1, dtype=jnp.int32), 0)


def _flat(places: Places, T: int) -> Array:
    """Index of every token of every sequence in the flattened packed rows [M, T]."""
    return places.row[:, None] * T + places.offset[:, None] + jnp.arange(T)
