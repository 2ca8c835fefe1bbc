"""The exchange: every agent's rollouts, seen by every learner in its own tokens.

``share`` gathers a step's rollouts in one device-resident Buffer; ``view`` lays them out as one learner's rows. Between
agents of one tokenizer the rows are built by ``same_tokenizer_rows``, a jitted function from device buffers to device
buffers. Another tokenizer has other tokens for the same text, so those rows start from the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from hacrl_jax import diagnostics, groups, hacpo, tokenizer
from hacrl_jax.config import Config, ObjectiveConfig
from hacrl_jax.tokenizer import Tokenizer
from hacrl_jax.types import Array, Buffer, Minibatch, Rollouts, UserError


class Crossing(NamedTuple):
    """What became of one source's responses on their way to one learner."""

    lossy: int = 0  # dropped: the learner's tokens do not decode to the source's text
    too_long: int = 0  # dropped: more tokens than the learner's max_response
    inflation: float = 1.0  # the learner's tokens over the source's, of what got through

    @property
    def dropped(self) -> int:
        return self.lossy + self.too_long


@struct.dataclass
class Rows:
    """Sequences of one source in one learner's tokens, before any advantage: one sequence a row."""

    tokens: Array  # [N, T] int32: prompt, then response
    prompt_length: Array  # [N] int32
    scored_length: Array  # [N] int32: response tokens in the loss
    source_token_logprob: Array  # [N, T] float32; 0 where the source has other tokens
    sampler_token_logprob: Array  # [N, T] float32, likewise
    source_logprob: Array  # [N] float32: mean over the source's own scored tokens
    valid: Array  # [N] bool


def share(rollouts: Sequence[Rollouts], scores: Sequence[Array], reward: np.ndarray,
          text: Sequence[Sequence[str]]) -> Buffer:  # fmt: skip
    """The shared rollout buffer of a step. reward [n, N]; NaN marks a response that could not be scored."""
    chex.assert_shape(reward, (len(rollouts), rollouts[0].length.shape[0]))
    return Buffer(tuple(rollouts), tuple(scores), jnp.asarray(reward, jnp.float32), tuple(map(tuple, text)))


def view(buffer: Buffer, prompts: Array, prompt_length: Array, learner: int, tokenizers: Sequence[Tokenizer],
         capability_ratio: Array, objective: ObjectiveConfig) -> tuple[Minibatch, list[Crossing]]:  # fmt: skip
    """All sequences that the learner trains on in this step, source by source, with its advantages.

    prompts [B, P] and prompt_length [B] are the learner's own rendering of the problems; capability_ratio [n] is
    P_source / P_learner. Row s * N + i is sample i of sources(...)[s]. Dropped rows have valid False. The s-th Crossing
    says what did not get through from that source.
    """
    parts, crossings = [], []
    chosen = sources(len(buffer.rollouts), learner, objective)
    for j in chosen:
        rollout = buffer.rollouts[j]
        if j == learner or tokenizers[j].fingerprint == tokenizers[learner].fingerprint:
            final_eos = -1 if j == learner else tokenizers[learner].eos[0]
            parts.append(same_tokenizer_rows(
                rollout, buffer.score[j], prompts, prompt_length, final_eos, eos=objective.eos,
            ))  # fmt: skip
            crossings.append(Crossing())
        else:
            pair = tokenizers[j], tokenizers[learner]
            rows, crossing = other_tokenizer_rows(buffer, j, prompts, prompt_length, *pair, objective)
            parts.append(rows)
            crossings.append(crossing)
    reward = jnp.stack([buffer.reward[j] for j in chosen])
    fates = [(buffer.rollouts[j].length, buffer.rollouts[j].stopped) for j in chosen]
    rows = assemble(
        tuple(parts), reward, fates, capability_ratio, prompts=prompts.shape[0],
        responses=buffer.rollouts[0].response.shape[1], chosen=chosen, learner=learner, objective=objective,
    )  # fmt: skip
    return rows, crossings


def check(tokenizers: Sequence[Tokenizer], objective: ObjectiveConfig) -> None:
    """Raise UserError for settings that these tokenizers cannot serve."""
    differ = len({tok.fingerprint for tok in tokenizers}) > 1
    if differ and objective.cross == "naive" and objective.ratio == "token":
        raise UserError(
            "objective: cross naive with ratio token needs a source log-prob for each of the learner's tokens, which "
            "agents of different tokenizers do not have; set objective.ratio=sequence"
        )


def sources(n: int, learner: int, objective: ObjectiveConfig) -> tuple[int, ...]:
    """The agents whose samples this learner trains on."""
    return (learner,) if objective.cross == "none" else tuple(range(n))


@partial(jax.jit, static_argnames="eos")
def same_tokenizer_rows(
    rollouts: Rollouts, score: Array, prompts: Array, prompt_length: Array, final_eos: int | Array, *, eos: str
) -> Rows:  # fmt: skip
    """Rows of a source whose ids the learner shares: device buffers in, device buffers out.

    score [N, R]: the source's log-probs of its response. final_eos replaces the EOS that ended a response (the two
    agents may end with different ids); negative keeps the sampled ids, as a learner's own rows must.
    """
    N, R = rollouts.response.shape
    B, P = prompts.shape
    chex.assert_shape(score, (N, R))
    last = jnp.arange(R) == rollouts.length[:, None] - 1
    swap = last & rollouts.stopped[:, None] & (jnp.asarray(final_eos) >= 0)
    response = jnp.where(swap, final_eos, rollouts.response)
    scored_length = scored_lengths(rollouts.length, rollouts.stopped, eos)
    tokens, lengths = join(prompts, prompt_length, response, scored_length)
    zeros = jnp.zeros((B, P))
    return Rows(
        tokens=tokens,
        prompt_length=lengths,
        scored_length=scored_length,
        source_token_logprob=join(zeros, prompt_length, score, scored_length)[0],
        sampler_token_logprob=join(zeros, prompt_length, rollouts.logprob, scored_length)[0],
        source_logprob=mean_logprob(score, scored_length),
        valid=jnp.ones(N, bool),
    )


def other_tokenizer_rows(buffer: Buffer, j: int, prompts: Array, prompt_length: Array, source: Tokenizer,
                         learner: Tokenizer, objective: ObjectiveConfig) -> tuple[Rows, Crossing]:  # fmt: skip
    """Rows of a source with other tokens: its ids are decoded and encoded again on the host.

    A response that does not come back character for character, or is longer than R tokens, is dropped and counted
    (cross_too_long truncate: cut to R tokens, its reward kept, as the authors do).
    """
    rollouts = buffer.rollouts[j]
    ids, length, stopped = (np.asarray(x) for x in (rollouts.response, rollouts.length, rollouts.stopped))
    N, R = ids.shape
    response = np.zeros((N, R), np.int32)
    scored = np.zeros(N, np.int32)
    valid = np.zeros(N, bool)
    lossy = too_long = 0
    for i in range(N):
        encoded = tokenizer.reencode(source, learner, ids[i, : length[i] - stopped[i]].tolist())
        if encoded is None:
            lossy += 1
            continue
        # A response that is only EOS keeps it, whatever the setting.
        ended = stopped[i] and (objective.eos == "trained" or not encoded)
        encoded = [*encoded, learner.eos[0]] if ended else encoded
        if len(encoded) > R and objective.cross_too_long == "drop":
            too_long += 1
            continue
        encoded = encoded[:R]
        if encoded and max(encoded) >= learner.vocab_size:
            raise UserError(f"token id {max(encoded)} is outside the vocabulary of {learner.vocab_size} ids")
        response[i, : len(encoded)], scored[i], valid[i] = encoded, len(encoded), True
    rows = _text_rows(prompts, prompt_length, response, scored, valid, buffer.score[j], rollouts.length,
                      rollouts.stopped, eos=objective.eos)  # fmt: skip
    sent = scored_lengths(rollouts.length, rollouts.stopped, objective.eos)
    return rows, Crossing(lossy, too_long, float(diagnostics.token_inflation(scored, sent, valid)))


@partial(jax.jit, static_argnames="eos")
def _text_rows(prompts: Array, prompt_length: Array, response: Array, scored: Array, valid: Array, score: Array,
               length: Array, stopped: Array, *, eos: str) -> Rows:  # fmt: skip
    tokens, lengths = join(prompts, prompt_length, response, scored)
    nothing = jnp.zeros(tokens.shape)
    source_logprob = mean_logprob(score, scored_lengths(length, stopped, eos))
    return Rows(tokens, lengths, scored, nothing, nothing, source_logprob, valid)


@partial(jax.jit, static_argnames=("prompts", "responses", "chosen", "learner", "objective"))
def assemble(
    parts: tuple[Rows, ...], reward: Array, fates: list[tuple[Array, Array]], capability_ratio: Array, *, prompts: int,
    responses: int, chosen: tuple[int, ...], learner: int, objective: ObjectiveConfig,
) -> Minibatch:  # fmt: skip
    """The rows of the chosen sources as one Minibatch with the learner's advantages.

    reward [chosen, N]; fates: (length, stopped) of each source's responses in its own tokens; prompts is B, responses
    is R.
    """
    N = reward.shape[1]
    rows: Rows = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *parts)
    total, T = rows.tokens.shape
    chex.assert_shape(rows.valid, (len(chosen) * N,))
    flat = reward.reshape(-1)  # [total]
    length, stopped = (jnp.concatenate(leaves) for leaves in zip(*fates, strict=True))
    prompt = jnp.tile(jnp.repeat(jnp.arange(prompts, dtype=jnp.int32), N // prompts), len(chosen))
    source = jnp.repeat(jnp.asarray(chosen, jnp.int32), N)
    valid = rows.valid & ~jnp.isnan(flat)
    flat, valid = groups.overlong(jnp.where(valid, flat, 0.0), length, stopped, valid, responses, objective)
    valid = groups.keep_groups(flat, prompt, source, valid, learner, objective)
    advantage, _ = hacpo.advantage(flat, prompt, source, valid, learner, capability_ratio, objective)
    return Minibatch(
        **layout(rows.replace(valid=valid)),
        source_token_logprob=rows.source_token_logprob,
        sampler_token_logprob=rows.sampler_token_logprob,
        reference_token_logprob=jnp.zeros((total, T)),
        source_logprob=rows.source_logprob[:, None],
        advantage=advantage[:, None],
        capability_ratio=capability_ratio[source][:, None],
        source=source[:, None],
        valid=valid[:, None],
    )


def layout(rows: Rows) -> dict[str, Array]:
    """The token-level layout of padded rows: tokens, positions, segment, scored, each [N, T]."""
    at = jnp.arange(rows.tokens.shape[1], dtype=jnp.int32)[None]
    start, end = rows.prompt_length[:, None], (rows.prompt_length + rows.scored_length)[:, None]
    return {
        "tokens": rows.tokens,
        "positions": jnp.broadcast_to(at, rows.tokens.shape),
        "segment": (at < end).astype(jnp.int32),
        "scored": (at >= start) & (at < end) & rows.valid[:, None],
    }


def join(prompts: Array, prompt_length: Array, response: Array, length: Array) -> tuple[Array, Array]:
    """Each response [N, R] right after its prompt [B, P]: ([N, P + R] values, [N] prompt lengths)."""
    (B, P), (N, R) = prompts.shape, response.shape
    prompts = jnp.repeat(prompts, N // B, axis=0)
    start = jnp.repeat(prompt_length, N // B)
    at = jnp.arange(P + R)[None]
    inside = at - start[:, None]
    pick = jnp.take_along_axis(response, jnp.clip(inside, 0, R - 1), axis=1)
    prompt = jnp.pad(prompts, ((0, 0), (0, R)))
    value = jnp.where(inside < 0, prompt, jnp.where(inside < length[:, None], pick, jnp.zeros((), response.dtype)))
    return value, start


def scored_lengths(length: Array, stopped: Array, eos: str) -> Array:
    """Response tokens that enter the loss [N]: with `excluded` the final EOS leaves, unless it is all there is."""
    return length if eos == "trained" else jnp.where(stopped & (length > 1), length - 1, length)


def mean_logprob(logprob: Array, length: Array) -> Array:
    """Mean over the first length[i] tokens of each row of logprob [N, R]; 0 for an empty row."""
    inside = jnp.arange(logprob.shape[1]) < length[:, None]
    return jnp.sum(jnp.where(inside, logprob, 0.0), axis=1) / jnp.maximum(length, 1)


def minibatches(config: Config, learner: int) -> list[np.ndarray]:
    """Row indices of a view, one array per update, in the order of the updates; the same in every step.

    own_first: B / minibatch updates of own rows, then cross updates of as many rows in which all other sources have
    equal shares. mixed: every update holds `minibatch` whole prompts with all their samples.
    """
    B, G = config.rollout.prompts, config.rollout.samples
    chosen = sources(len(config.agents), learner, config.objective)
    rows = np.arange(len(chosen) * B * G).reshape(len(chosen), B * G)
    if config.objective.order == "mixed" or len(chosen) == 1:
        blocks = rows.reshape(len(chosen), B // config.minibatch, -1)
        return list(blocks.transpose(1, 0, 2).reshape(B // config.minibatch, -1))
    own = rows[learner].reshape(B // config.minibatch, -1)
    cross = np.delete(rows, learner, axis=0)
    share = config.minibatch * G // len(cross)
    return [*own, *cross.reshape(len(cross), -1, share).transpose(1, 0, 2).reshape(-1, share * len(cross))]


def shared(config: Config, learner: int) -> int:
    """So many rows in turn, from the first on, answer one prompt in every one of these minibatches."""
    G, others = config.rollout.samples, len(sources(len(config.agents), learner, config.objective)) - 1
    mixed = config.objective.order == "mixed" or not others
    return G if mixed else math.gcd(G, config.minibatch * G // others)


@jax.jit
def replace(rollouts: Rollouts, fresh: Rollouts, chosen: Array) -> Rollouts:
    """rollouts with the samples of some prompts, chosen [B] bool, taken from fresh."""
    B = chosen.shape[0]

    def one(old: Array, new: Array) -> Array:
        mask = jnp.repeat(chosen, old.shape[0] // B)
        return jnp.where(mask.reshape(-1, *[1] * (old.ndim - 1)), new, old)

    return jax.tree.map(one, rollouts, fresh)


@jax.jit
def take(rows: Minibatch, index: Array) -> Minibatch:
    """The rows of one update."""
    return jax.tree.map(lambda x: x[index], rows)


@jax.jit
def own_rows(rollouts: Rollouts, prompts: Array, prompt_length: Array) -> Minibatch:
    """A source's own rollouts as a Minibatch of N rows to be scored: the rows of ``view``, with nothing known yet."""
    nothing = jnp.zeros(rollouts.response.shape)
    rows = same_tokenizer_rows(rollouts, nothing, prompts, prompt_length, -1, eos="trained")
    blank = jnp.zeros((*rows.valid.shape, 1))
    return Minibatch(
        **layout(rows),
        source_token_logprob=rows.source_token_logprob,
        sampler_token_logprob=rows.source_token_logprob,
        reference_token_logprob=rows.source_token_logprob,
        source_logprob=blank, advantage=blank, capability_ratio=blank,
        source=blank.astype(jnp.int32), valid=rows.valid[:, None],
    )  # fmt: skip


@partial(jax.jit, static_argnames="responses")
def response_part(values: Array, prompt_length: Array, *, responses: int) -> Array:
    """The response's share of row values [N, T] as [N, responses], 0 past the row's end; prompt_length [B]."""
    N, T = values.shape
    start = jnp.repeat(prompt_length, N // prompt_length.shape[0])[:, None]
    at = start + jnp.arange(responses)
    return jnp.where(at < T, jnp.take_along_axis(values, jnp.minimum(at, T - 1), axis=1), 0.0)
