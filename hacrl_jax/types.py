"""Every record and pytree that flows between rooms, and the shape legend.

Shape legend (trailing comments such as ``# [M, T]`` use these letters):

    n  agents                 B  prompts of a step          G  samples per prompt and agent
    N  B * G, the samples of one agent in a step, prompt-major: sample g of prompt b is row b * G + g
    P  padded prompt length   R  padded response length     T  padded row length of a learner
    M  rows of a minibatch    S  sequences in a row (1 when rows are padded, more when they are packed)
    L  layers   D  hidden size   H  query heads   K  key/value heads   h  head size   V  vocabulary rows

Masks always come from lengths, never from comparing ids with pad.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from flax import struct

Array = jax.Array
Params = dict[str, Any]
"""A policy's parameters: one nested dict of arrays. Layer arrays are stacked: leading axis L."""


class UserError(Exception):
    """A mistake of the user (config, file, data): the CLI prints it as one line and exits with status 2."""


@dataclass(frozen=True)
class Problem:
    """One question with its verified answer.

    id is unique within its data set, below 2**31, and part of every random key, so a sample does not depend on the
    batch it was drawn in.
    """

    id: int
    messages: tuple[tuple[str, str], ...]  # (role, content), oldest first
    gold: str
    source: str  # the data set's name


@struct.dataclass
class Rollouts:
    """What one agent answered in one step, in its own tokens, on the device."""

    prompt: Array  # [B, P] int32, right-padded
    prompt_length: Array  # [B] int32
    response: Array  # [N, R] int32, right-padded, the final EOS included where one was sampled
    length: Array  # [N] int32, tokens of the response, the final EOS included
    logprob: Array  # [N, R] float32, the sampler's own log-probs at the sampling temperature
    stopped: Array  # [N] bool: ended by an EOS id (otherwise by the length limit)


@struct.dataclass
class Buffer:
    """The shared rollout buffer: all agents' rollouts of a step, resident in device memory.

    text is the only host part: it serves verification, logs, and learners with another tokenizer.
    """

    rollouts: tuple[Rollouts, ...]  # n, each in its source's tokens
    score: tuple[Array, ...]  # n of [N, R] float32: log-probs under the source, by the update's own forward
    reward: Array  # [n, N] float32
    text: tuple[tuple[str, ...], ...] = struct.field(pytree_node=False)  # n of N responses, without EOS


@struct.dataclass
class Minibatch:
    """Rows as one learner trains on them. A row holds S sequences (prompt and response, one after the other).

    Token-level leaves are [M, T]; sequence-level leaves are [M, S]; the s-th sequence of a row owns the tokens whose
    segment is s + 1. The log-prob of token t is predicted at t - 1.
    """

    tokens: Array  # [M, T] int32
    positions: Array  # [M, T] int32, from 0 in every sequence
    segment: Array  # [M, T] int32, 1..S, 0 is padding
    scored: Array  # [M, T] bool: response tokens that enter the loss
    source_token_logprob: Array  # [M, T] float32 under the source at sampling; 0 where unknown (other tokenizers)
    sampler_token_logprob: Array  # [M, T] float32, the sampler's own; 0 where unknown
    reference_token_logprob: Array  # [M, T] float32 under the initial policy; zeros when KL is off
    source_logprob: Array  # [M, S] float32: mean log-prob under the source over its own tokens
    advantage: Array  # [M, S] float32
    capability_ratio: Array  # [M, S] float32: P_source / P_learner, clipped
    source: Array  # [M, S] int32: agent that sampled it
    valid: Array  # [M, S] bool: False for empty slots and dropped sequences
