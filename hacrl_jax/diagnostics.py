"""What crosses each edge source -> learner, from the per-sequence values that hacpo.loss returns.

Every array of hacpo.Diagnostics may have any shape here: the micro-batches and minibatches of a step are laid together
before they are reduced, so that means and quantiles are those of the sequences, whatever the splits.
"""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from flax import struct

from hacrl_jax.hacpo import Diagnostics
from hacrl_jax.types import Array

QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)


@struct.dataclass
class Edges:
    """One learner's edges, entry j from source j; NaN where the source sent no valid sequence (shares: 0)."""

    sequences: Array  # [n] int32
    tokens: Array  # [n] mean scored tokens per sequence, in the learner's tokenizer
    ratio_mean: Array  # [n] s, equation 11, before clipping
    ratio_quantiles: Array  # [n, 5] at QUANTILES
    effective_sample_size: Array  # [n] (sum s)^2 / sum s^2 / sequences: 1 where all ratios are equal
    clipped_low: Array  # [n] share of sequences (token ratios: of tokens) whose gradient the lower bound stops
    clipped_high: Array  # [n] the same at the upper bound
    capability_ratio: Array  # [n] P_j / P_k
    gradient_share: Array  # [n] see edges


@partial(jax.jit, static_argnames="n")
def edges(diagnostics: Diagnostics, n: int) -> Edges:
    """Reduce per-sequence values by their source, over all of n agents.

    gradient_share is source j's part of the summed squared norms of d loss / d token log-prob. That stops before the
    model, so it costs nothing, and it ignores how much the gradients of sequences cancel: it says who pulls, not where.
    """
    flat = jax.tree.map(jnp.ravel, diagnostics)
    member = flat.valid & (flat.source == jnp.arange(n)[:, None])  # [n, sequences]
    count = member.sum(axis=1)

    def mean(values: Array) -> Array:
        return jnp.where(member, values, 0).sum(axis=1) / count

    ratio = jnp.where(member, flat.ratio, jnp.nan)
    total, square = jnp.nansum(ratio, axis=1), jnp.nansum(ratio**2, axis=1)
    pull = jnp.where(member, flat.gradient_square, 0).sum(axis=1)
    everything = pull.sum()
    return Edges(
        sequences=count,
        tokens=mean(flat.tokens),
        ratio_mean=mean(flat.ratio),
        ratio_quantiles=jnp.nanquantile(ratio, jnp.asarray(QUANTILES, ratio.dtype), axis=1).T,
        effective_sample_size=total**2 / square / count,
        clipped_low=mean(flat.clipped_low),
        clipped_high=mean(flat.clipped_high),
        capability_ratio=mean(flat.capability_ratio),
        gradient_share=pull / jnp.where(everything > 0, everything, 1),
    )


@jax.jit
def token_inflation(tokens: Array, source_tokens: Array, valid: Array) -> Array:
    """Tokens of an edge's responses in the learner's tokenizer over those in the source's: a ratio of sums, [].

    All three [rows], valid bool; 1 for one tokenizer, NaN when nothing is valid.
    """
    return jnp.where(valid, tokens, 0).sum() / jnp.where(valid, source_tokens, 0).sum()


@partial(jax.jit, static_argnames="learner")
def mismatch(diagnostics: Diagnostics, learner: int) -> dict[str, Array]:
    """How far the sampler's and the stored log-probs are from the trainer's, over the learner's own sequences.

    Means over sequences of token means; `max` is over sequences. Zeros are what one hopes for.
    """
    own = diagnostics.valid & (diagnostics.source == learner)
    count = own.sum()

    def mean(values: Array) -> Array:
        return jnp.where(own, values, 0).sum() / count

    def largest(values: Array) -> Array:
        return jnp.where(own, jnp.abs(values), 0).max()

    return {
        "score_mismatch": largest(diagnostics.score_mismatch),
        "sampler_mismatch/mean": mean(diagnostics.sampler_mismatch),
        "sampler_mismatch/max": largest(diagnostics.sampler_mismatch),
        "sampler_mismatch/kl": mean(diagnostics.sampler_kl),
        "tis/weight": mean(diagnostics.tis_weight),
        "tis/truncated": mean(diagnostics.tis_truncated),
        "kl": mean(diagnostics.kl),
    }


def summary(diagnostics: Diagnostics, learner: int, n: int) -> dict[str, float]:
    """The metrics of one learner's step, on the host: own samples, other agents' together, and every edge apart.

    Keys: ratio/{own,cross}/{mean,p05,p50,p95,ess}, clip/{own,cross}/{low,high}, gradient_share/cross, those of
    mismatch, and for each other source j edge/j/{sequences,tokens,ratio,p05,p50,p95,ess,clip_low,clip_high,
    capability_ratio,gradient_share}. What has no sequences is left out.
    """
    other = diagnostics.replace(source=(diagnostics.source != learner).astype(jnp.int32))
    kinds, each, apart = jax.device_get((edges(other, 2), edges(diagnostics, n), mismatch(diagnostics, learner)))
    metrics = {}
    for index, kind in enumerate(("own", "cross")):
        values = _edge(kinds, index)
        if not values["sequences"]:
            continue
        metrics |= {f"ratio/{kind}/{key}": values[key] for key in ("p05", "p50", "p95", "ess")}
        metrics |= {f"ratio/{kind}/mean": values["ratio"], f"clip/{kind}/low": values["clip_low"]}
        metrics |= {f"clip/{kind}/high": values["clip_high"]}
    if kinds.sequences[0]:
        metrics |= {key: float(value) for key, value in apart.items()}
    if kinds.sequences[1]:
        metrics["gradient_share/cross"] = float(kinds.gradient_share[1])
    for j in range(n):
        if j != learner and each.sequences[j]:
            metrics |= {f"edge/{j}/{key}": value for key, value in _edge(each, j).items()}
    return metrics


def _edge(edges: Edges, j: int) -> dict[str, float]:
    low, _, median, _, high = edges.ratio_quantiles[j].tolist()
    return {
        "sequences": int(edges.sequences[j]), "tokens": float(edges.tokens[j]), "ratio": float(edges.ratio_mean[j]),
        "p05": low, "p50": median, "p95": high, "ess": float(edges.effective_sample_size[j]),
        "clip_low": float(edges.clipped_low[j]), "clip_high": float(edges.clipped_high[j]),
        "capability_ratio": float(edges.capability_ratio[j]), "gradient_share": float(edges.gradient_share[j]),
    }  # fmt: skip
