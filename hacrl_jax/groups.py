"""What happens to rewards and groups before the loss: overlong answers, and groups that teach nothing.

Pure functions on the rewards and valid masks of a step. What they drop leaves baseline, std and denominators together,
because valid is what all of those count. Capability (equation 8) is taken from the rewards before any of this.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from hacrl_jax.config import ObjectiveConfig
from hacrl_jax.hacpo import uniform
from hacrl_jax.types import Array


def overlong(
    reward: Array, length: Array, stopped: Array, valid: Array, max_response: int, settings: ObjectiveConfig
) -> tuple[Array, Array]:
    """Rewards and valid masks [N] after the treatment of answers that were cut off, or nearly.

    length [N] counts tokens of the source's own tokenizer, stopped [N] is False where the limit ended the answer.
    `mask` drops answers that were cut off (DAPO's overlong filtering). `penalty` subtracts what grows from 0 to 1 over
    the last overlong_buffer tokens before max_response (DAPO, arXiv 2503.14476, equation 13); with a buffer of 0 only
    answers that were cut off pay.
    """
    match settings.overlong:
        case "keep":
            return reward, valid
        case "mask":
            return reward, valid & stopped
        case "penalty":
            buffer = settings.overlong_buffer
            over = (length - (max_response - buffer)).astype(reward.dtype)
            penalty = jnp.clip(over / buffer, 0, 1) if buffer else (~stopped).astype(reward.dtype)
            return reward - penalty, valid


def with_signal(
    reward: Array, prompt: Array, source: Array, valid: Array, learner: int | Array, settings: ObjectiveConfig
) -> Array:
    """Which samples belong to a group from which this learner can learn: [N] bool.

    The samples of a group are those that its baseline counts: all agents', or the learner's own with cross `none`.
    Arguments as of hacpo.advantage.
    """
    counted = valid & (source == learner) if settings.cross == "none" else valid
    return counted & ~uniform(reward, prompt, counted)


def keep_groups(
    reward: Array, prompt: Array, source: Array, valid: Array, learner: int | Array, settings: ObjectiveConfig
) -> Array:
    """valid [N] after `groups`: `drop` and `resample` leave out groups without signal, `keep` lets them in with A = 0.

    Kept groups push nothing but count in the denominators; dropped ones make the rest weigh more.
    """
    if settings.groups == "keep":
        return valid
    return valid & with_signal(reward, prompt, source, valid, learner, settings)


class Resampling(NamedTuple):
    """prompts: positions in the batch to be answered again, empty when it is over; message: what to tell the user."""

    prompts: np.ndarray
    message: str


def resample(signal: np.ndarray, attempt: int, settings: ObjectiveConfig) -> Resampling:
    """Whether to answer some prompts again, after attempt number `attempt` (the first answers are attempt 0).

    signal [B] bool. At most settings.resample_attempts attempts follow the first; what has no signal then is dropped.
    """
    silent = np.flatnonzero(~np.asarray(signal, bool))
    count, most = len(silent), settings.resample_attempts
    if settings.groups != "resample" or not count:
        return Resampling(silent[:0], "")
    part = f"{count} of {len(signal)} groups have no signal (all rewards equal)"
    if attempt < most:
        return Resampling(silent, f"{part}: sampling them again, attempt {attempt + 1} of {most}")
    advice = "raise objective.resample_attempts, or choose easier or harder problems"
    return Resampling(silent[:0], f"{part} after {most} attempts: dropped; {advice}")
