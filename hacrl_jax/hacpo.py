"""HACPO, equation by equation (arXiv 2603.02604, first version's numbers): the paper as pure functions.

Every function is jit-compatible, keeps the dtype of what it is given, and differentiates; settings are static. Where
the paper's text is silent the authors' code decides, and docs/objective.md sets paper, authors and defaults side by
side. k is the learner, j the source of a sample, m the index of the learner's update inside a step.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct
from jax.lax import stop_gradient

from hacrl_jax.config import ObjectiveConfig
from hacrl_jax.types import Array, Minibatch

CAPABILITY_FLOOR = 1e-8
CAPABILITY_RATIO_RANGE = (0.1, 10.0)
UNIFORM_TOLERANCE = 1e-6  # rewards of a group closer than this are equal
KL_EXPONENT_LIMIT = 20.0  # keeps k3 finite in float32; far outside what a trained policy reaches


@struct.dataclass
class Denominators:
    """What the sums over a minibatch are divided by: known before its micro-batches, so that their losses add up."""

    sequences: Array  # [] valid sequences
    tokens: Array  # [] their scored tokens
    constant: Array  # [] the divisor of `aggregation: constant`


@struct.dataclass
class Diagnostics:
    """Per-sequence values of one micro-batch, [M, S] each; diagnostics.py reduces them per edge source -> learner.

    Sequences that take no part (`valid` False) hold zeros, and ratio 1.
    """

    valid: Array  # bool: takes part in the loss
    source: Array  # int32: the agent that sampled it
    capability_ratio: Array  # P_source / P_learner
    tokens: Array  # scored tokens, in the learner's tokenizer
    ratio: Array  # s, equation 11, before any clip but with |log s| limited
    clipped_low: Array  # share of the tokens whose gradient the lower bound stops (0 or 1 for sequence ratios)
    clipped_high: Array  # the same at the upper bound
    objective: Array  # what the sequence contributes, before the mean over sequences
    kl: Array  # token mean of the KL estimator; 0 for other agents' samples
    score_mismatch: Array  # mean log-prob now - stored score; own samples at m = 0, where it should be 0
    sampler_mismatch: Array  # token mean of score - the sampler's own log-prob, both under the source
    sampler_kl: Array  # k3 estimate of KL(sampler || source) from the same tokens
    tis_weight: Array  # token mean of the truncated importance weight; 1 when it is off
    tis_truncated: Array  # share of the tokens whose weight the cap cut
    gradient_square: Array  # squared norm of d loss / d token log-prob over the sequence's tokens


# --- capability: equations 8 and 9 ---


def capability(history: Array, window: int) -> Array:
    """P_k, equation 8: mean of the last `window` steps' batch scores, the current step included.

    history [steps, n] holds one score per step and agent (mean reward or positive rate of all its samples, counted
    before any filter), oldest first. Returns [n], floored at 1e-8.
    """
    return jnp.maximum(history[-window:].mean(axis=0), CAPABILITY_FLOOR)


def capability_ratio(capability: Array) -> Array:
    """P_j / P_k as [n (learner k), n (source j)], clipped to [0.1, 10]; its inverse is omega(k, j), equation 9."""
    return jnp.clip(capability[None, :] / capability[:, None], *CAPABILITY_RATIO_RANGE)


# --- advantage: equations 6 and 7 ---


def advantage(
    reward: Array, prompt: Array, source: Array, valid: Array, learner: int | Array, ratio: Array,
    settings: ObjectiveConfig,
) -> tuple[Array, Array]:  # fmt: skip
    """Advantage of every sample for one learner, and the baseline it is measured against; equations 6 and 7.

    The baseline of a prompt is the mean over its samples from all agents of omega(k, j) R. reward [N]; prompt [N] int,
    the group a sample belongs to, below N; source [N] int; valid [N] bool, False leaves baseline and std; ratio [n] is
    P_j / P_k of this learner (a row of capability_ratio). Returns (advantage [N], baseline [N]); zeros where not valid.
    """
    own = source == learner
    valid = valid & own if settings.cross == "none" else valid
    reward = jnp.where(valid, reward, 0)

    def total(values: Array) -> Array:  # sum over the sample's group, seen by every sample: [N] -> [N]
        return jax.ops.segment_sum(jnp.where(valid, values, 0), prompt, num_segments=prompt.shape[0])[prompt]

    one = jnp.ones_like(reward)
    count = jnp.maximum(total(one), 1)
    mean = total(reward) / count
    omega = 1 / ratio[source] if settings.capability_baseline else one
    baseline = total(omega * reward) / count
    if settings.binary_guard:  # a success rate cannot exceed 1: fall back on what the learner itself achieved
        own_count = total(own * one)
        own_mean = jnp.where(own_count > 0, total(own * reward) / jnp.maximum(own_count, 1), mean)
        binary = jnp.all((reward == 0) | (reward == 1))  # other rewards may have a baseline above 1
        baseline = jnp.where(binary & (baseline > 1), own_mean, baseline)
    if settings.uniform_guard:
        baseline = jnp.where(uniform(reward, prompt, valid), mean, baseline)

    result = reward - baseline
    if settings.advantage_by_std:
        variance = total((reward - mean) ** 2) / jnp.maximum(count - 1, 1)
        positive = variance > 0  # the square root has no gradient at 0
        std = jnp.where(positive, jnp.sqrt(jnp.where(positive, variance, 1)), 0)
        result = result / (std + settings.advantage_eps)
    silent = ~valid | (count <= 1)
    if settings.uniform_guard:
        silent |= uniform(reward, prompt, valid)
    return jnp.where(silent, 0, result), jnp.where(valid, baseline, 0)


def uniform(reward: Array, prompt: Array, valid: Array) -> Array:
    """Whether a sample's group has equal rewards (to 1e-6), so that nothing can be learned from it: [N] -> [N] bool."""
    low, high = jnp.where(valid, reward, jnp.inf), jnp.where(valid, reward, -jnp.inf)
    groups = prompt.shape[0]
    lowest = jax.ops.segment_min(low, prompt, num_segments=groups)
    highest = jax.ops.segment_max(high, prompt, num_segments=groups)
    return ~(highest - lowest > UNIFORM_TOLERANCE)[prompt]


# --- ratios: equation 11 ---


def sequence_ratio(logprob: Array, source_logprob: Array, limit: float) -> Array:
    """s, equation 11: exp(mean log-prob under the learner now - mean log-prob under the source at sampling).

    Each mean is over its own tokens, in its own tokenizer. |log s| is limited. Also the ratio of single tokens.
    """
    return jnp.exp(clip(logprob - source_logprob, -limit, limit))


def clip(value: Array, low: Array | float, high: Array | float) -> Array:
    """Clip that passes the whole gradient on the closed interval, as torch.clamp does (jnp.clip: half at the bounds).

    The bounds matter: an own sample at its first visit, or two identical agents, sit exactly at s = 1.
    """
    inside = (value >= low) & (value <= high)
    return jnp.where(inside, value, stop_gradient(jnp.clip(value, low, high)))


# --- objectives ---


def own_objective(ratio: Array, advantage: Array, settings: ObjectiveConfig) -> Array:
    """min(s A, clip(s, 1 - eps_low, 1 + eps_high) A): GSPO on sequence ratios, GRPO on token ratios. Any shape."""
    clipped = clip(ratio, 1 - settings.eps_low, 1 + settings.eps_high)
    return jnp.minimum(ratio * advantage, clipped * advantage)


def cross_lower_bound(update_index: int | Array, settings: ObjectiveConfig) -> Array:
    """Lower clip bound of other agents' ratios at update m, equation 14: 1 - delta + m delta_step, at most 1."""
    return 1 - jnp.maximum(settings.delta - update_index * settings.delta_step, 0)


def cross_objective(
    ratio: Array, advantage: Array, capability_ratio: Array, update_index: int | Array, settings: ObjectiveConfig
) -> Array:
    """Objective of another agent's sample, equations 10, 12-14 and 50-52: c sg(c)^alpha (P_j / P_k) A. [M, S] each.

    c = clip(s, lower bound of update m, 1): the learner never moves towards a sample by more than its source would.
    """
    clipped = ratio
    if settings.clip_cross:
        clipped = clip(ratio, cross_lower_bound(update_index, settings).astype(ratio.dtype), 1.0)
    objective = clipped * stop_gradient(clipped) ** settings.alpha * advantage
    return objective * capability_ratio if settings.capability_gradient else objective


def kl_estimate(logprob: Array, reference: Array, estimator: str) -> Array:
    """Per-token estimates of KL(learner || reference) on the learner's own samples (Schulman, "Approximating KL").

    k1 = d, k2 = d^2 / 2, k3 = exp(-d) - 1 + d with d = logprob - reference. `k3_straight_through` has k3's value and
    k2's gradient, which is the one whose expectation is the gradient of the KL. Any shape.
    """
    difference = logprob - reference
    if estimator == "k1":
        return difference
    half_square = difference**2 / 2
    if estimator == "k2":
        return half_square
    k3 = jnp.expm1(clip(-difference, -KL_EXPONENT_LIMIT, KL_EXPONENT_LIMIT)) + difference
    return k3 if estimator == "k3" else half_square + stop_gradient(k3 - half_square)


# --- the loss of a minibatch, from its micro-batches ---


def denominators(
    batch: Minibatch, learner: int | Array, settings: ObjectiveConfig, max_response: int = 0
) -> Denominators:
    """The divisors of a WHOLE minibatch: [M, ...] over all its micro-batches and devices.

    max_response is only read by `aggregation: constant` with aggregation_constant 0 (sequences times max_response).
    """
    valid = _participating(batch, learner, settings)
    dtype = batch.source_logprob.dtype
    sequences = jnp.maximum(valid.sum(), 1).astype(dtype)
    scored = batch.scored & _per_token(valid, batch.segment)
    given = settings.aggregation_constant
    constant = jnp.asarray(given, dtype) if given else sequences * max(max_response, 1)
    return Denominators(sequences, jnp.maximum(scored.sum(), 1).astype(dtype), constant)


def loss(
    token_logprob: Array, batch: Minibatch, learner: int | Array, update_index: int | Array,
    denominators: Denominators, settings: ObjectiveConfig, *, exact_first_visit: bool = True,
) -> tuple[Array, Diagnostics]:  # fmt: skip
    """One micro-batch's share of the loss of its minibatch: shares of any split add up to the same value and gradient.

    token_logprob [M, T] under the learner now, token t at position t. update_index is m. With exact_first_visit an own
    sample at m = 0 takes the current value as its source's, so that s is exactly 1 on every backend. Returns the share
    (scalar) and the per-sequence Diagnostics; no gradient flows through those.
    """
    arguments = (batch, learner, update_index, denominators, settings, exact_first_visit)
    share, diagnostics = _share(token_logprob, *arguments)
    # Elementwise work on [M, T] beside a forward pass of the model: cheap, and it says who pulls at the policy.
    gradient, _ = jax.grad(_share, has_aux=True)(stop_gradient(token_logprob), *arguments)
    square = _per_sequence(gradient**2, batch.segment, batch.valid.shape[1])
    return share, stop_gradient(diagnostics.replace(gradient_square=square))


def _share(
    token_logprob: Array, batch: Minibatch, learner: int | Array, update_index: int | Array,
    denominators: Denominators, settings: ObjectiveConfig, exact_first_visit: bool,
) -> tuple[Array, Diagnostics]:  # fmt: skip
    slots = batch.valid.shape[1]
    own = batch.source == learner  # [M, S]
    valid = _participating(batch, learner, settings)  # [M, S]
    scored = batch.scored & _per_token(valid, batch.segment)  # [M, T]
    tokens = _per_sequence(scored.astype(token_logprob.dtype), batch.segment, slots)  # [M, S]

    def mask(values: Array) -> Array:  # before any arithmetic: a masked token may hold -inf or NaN
        return jnp.where(scored, values, 0)

    def token_mean(values: Array) -> Array:  # [M, T] -> [M, S]
        return _per_sequence(mask(values).astype(tokens.dtype), batch.segment, slots) / jnp.maximum(tokens, 1)

    token_logprob = mask(token_logprob)
    score, sampler = mask(batch.source_token_logprob), mask(batch.sampler_token_logprob)
    weight = truncated_weight(score, sampler, settings)
    logprob, source_logprob = token_mean(token_logprob), jnp.where(valid, batch.source_logprob, 0)
    first_visit = own & (update_index == 0) & exact_first_visit
    score_mismatch = jnp.where(valid & own & (update_index == 0), logprob - source_logprob, 0)
    source_logprob = jnp.where(first_visit, stop_gradient(logprob), source_logprob)
    source_token = jnp.where(_per_token(first_visit, batch.segment), stop_gradient(token_logprob), score)

    gain = jnp.where(valid, batch.advantage, 0)
    power = jnp.where(valid, batch.capability_ratio, 1)
    ratio = sequence_ratio(logprob, source_logprob, settings.max_abs_log_ratio)
    as_own = own if settings.cross == "hacpo" else jnp.ones_like(own)
    if settings.ratio == "token":
        token_ratio = sequence_ratio(token_logprob, source_token, settings.max_abs_log_ratio)
        token_gain = _per_token(gain, batch.segment)
        own_value = token_mean(own_objective(token_ratio, token_gain, settings) * weight)
        own_clips = [token_mean(flag) for flag in own_clipped(token_ratio, token_gain, settings)]
    else:
        own_value = own_objective(ratio, gain, settings) * token_mean(weight)
        own_clips = own_clipped(ratio, gain, settings)
    cross_value = cross_objective(ratio, gain, power, update_index, settings) * token_mean(weight)
    cross_clips = cross_clipped(ratio, update_index, settings)
    objective = jnp.where(valid, jnp.where(as_own, own_value, cross_value), 0)
    low, high = (jnp.where(valid, jnp.where(as_own, *pair), 0) for pair in zip(own_clips, cross_clips, strict=True))

    kl = jnp.zeros_like(objective)
    if settings.kl_coefficient:
        estimate = kl_estimate(token_logprob, mask(batch.reference_token_logprob), settings.kl_estimator)
        kl = jnp.where(valid & own, token_mean(estimate), 0)
    share = -aggregate(objective, tokens, denominators, settings)
    share += settings.kl_coefficient * kl.sum() / denominators.sequences
    return share, Diagnostics(
        valid=valid, source=batch.source, capability_ratio=power, tokens=tokens, ratio=jnp.where(valid, ratio, 1),
        clipped_low=low, clipped_high=high, objective=objective, kl=kl, score_mismatch=score_mismatch,
        sampler_mismatch=token_mean(score - sampler), sampler_kl=token_mean(kl_estimate(sampler, score, "k3")),
        tis_weight=jnp.where(valid, token_mean(weight), 1), tis_truncated=token_mean(weight == settings.tis_cap),
        gradient_square=jnp.zeros_like(objective),
    )  # fmt: skip


def aggregate(objective: Array, tokens: Array, denominators: Denominators, settings: ObjectiveConfig) -> Array:
    """Sum of per-sequence token means [M, S] over the minibatch's divisor: GSPO's and GRPO's `sequence_mean`, DAPO's
    `token_mean` over the global token count, Dr. GRPO's `constant`. tokens [M, S] are the sequences' lengths."""
    match settings.aggregation:
        case "sequence_mean":
            return objective.sum() / denominators.sequences
        case "token_mean":
            return (objective * tokens).sum() / denominators.tokens
        case "constant":
            return (objective * tokens).sum() / denominators.constant


def truncated_weight(source_logprob: Array, sampler_logprob: Array, settings: ObjectiveConfig) -> Array:
    """Truncated importance weight min(exp(score - sampler's log-prob), cap) per token; 1 when tis_cap is 0.

    It corrects for a sampler that computes other probabilities than the trainer does for the same policy.
    """
    if not settings.tis_cap:
        return jnp.ones_like(source_logprob)
    limit = settings.max_abs_log_ratio
    return jnp.minimum(sequence_ratio(source_logprob, sampler_logprob, limit), settings.tis_cap)


def own_clipped(ratio: Array, advantage: Array, settings: ObjectiveConfig) -> tuple[Array, Array]:
    """Where own_objective stops the gradient, at its lower and at its upper bound, as 0 or 1."""
    low = (ratio < 1 - settings.eps_low) & (advantage < 0)
    high = (ratio > 1 + settings.eps_high) & (advantage > 0)
    return low.astype(ratio.dtype), high.astype(ratio.dtype)


def cross_clipped(ratio: Array, update_index: int | Array, settings: ObjectiveConfig) -> tuple[Array, Array]:
    """Where cross_objective stops the gradient, at its lower and at its upper bound, as 0 or 1."""
    if not settings.clip_cross:
        return jnp.zeros_like(ratio), jnp.zeros_like(ratio)
    low = ratio < cross_lower_bound(update_index, settings).astype(ratio.dtype)
    return low.astype(ratio.dtype), (ratio > 1).astype(ratio.dtype)


def _participating(batch: Minibatch, learner: int | Array, settings: ObjectiveConfig) -> Array:
    return batch.valid & (batch.source == learner) if settings.cross == "none" else batch.valid  # [M, S]


def _per_sequence(values: Array, segment: Array, slots: int) -> Array:
    member = segment[..., None] == jnp.arange(1, slots + 1)  # [M, T, S], fused into the sum
    return jnp.where(member, values[..., None], 0).sum(axis=1)  # [M, S]


def _per_token(values: Array, segment: Array) -> Array:
    spread = jnp.take_along_axis(values, jnp.maximum(segment - 1, 0), axis=1)  # [M, T]
    return jnp.where(segment > 0, spread, jnp.zeros((), values.dtype))
