"""The learner: token log-probs in chunks, the loss of a minibatch, and one jitted, donated update.

Everything is a pure function of (LearnerState, Minibatch); ``build`` closes over what is static (graph, settings) and
returns the two compiled programs that an agent runs. The arithmetic of the loss is hacpo.loss.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from hacrl_jax import hacpo, models
from hacrl_jax.config import AgentConfig, ObjectiveConfig, OptimizerConfig
from hacrl_jax.sharding import sharding
from hacrl_jax.types import Array, Minibatch, Params


@struct.dataclass
class LearnerState:
    """What an update changes. frozen holds the leaves that no gradient reaches (the base under LoRA), else Nones."""

    trainable: Params
    frozen: Params
    moments: Any  # optax state; its count is the number of finite updates
    updates: Array  # [] int32: all updates tried, the clock of the learning-rate schedule

    @property
    def params(self) -> Params:
        return combine(self.trainable, self.frozen)


@struct.dataclass
class Outcome:
    """What one update tells: scalars, and per-sequence values that hacpo's diagnostics reduce at the end of a step."""

    loss: Array  # []
    grad_norm: Array  # [] before clipping
    lr: Array  # []
    entropy: Array  # [] token mean over the scored tokens, nats
    nonfinite: Array  # [] bool: nothing was changed
    diagnostics: hacpo.Diagnostics  # leaves [M, S]


class Learner(NamedTuple):
    """The compiled programs of one policy.

    score(params, minibatch) -> log-probs [M, T] of the scored tokens under params, by the update's own forward.
    update(state, minibatch, m) -> (state, Outcome); state is donated; m counts this learner's updates of the step.
    """

    init: Callable[[Params], LearnerState]
    score: Callable[[Params, Minibatch], Array]
    update: Callable[[LearnerState, Minibatch, Array], tuple[LearnerState, Outcome]]


@dataclass(frozen=True)
class Forward:
    """The static half of a forward pass: what a log-prob depends on besides parameters and tokens."""

    graphdef: Any
    vocab_size: int  # ids the tokenizer has; higher rows of the head have no probability
    temperature: float
    dtype: Any
    chunk: int  # tokens whose logits exist at one time
    responses: int  # scored tokens of a row at most, R; other positions never meet the head
    remat: str = "none"
    attention: str = "xla"


def build(forward: Forward, agent: AgentConfig, objective: ObjectiveConfig, learner: int, mesh: Mesh,
          total_updates: int) -> Learner:  # fmt: skip
    """The programs of learner number `learner`; total_updates is the length of the learning-rate schedule."""
    optimizer, rate = make_optimizer(agent.optimizer, total_updates)
    stack = partial(_stack, size=agent.micro_batch, mesh=mesh)

    def init(params: Params) -> LearnerState:
        trainable, frozen = split(params)
        return LearnerState(trainable, frozen, optimizer.init(trainable), jnp.zeros((), jnp.int32))

    def score(params: Params, minibatch: Minibatch) -> Array:
        def one(_, part: Minibatch):
            return None, token_logprobs(forward, params, part)[0]

        return _unstack(jax.lax.scan(one, None, stack(minibatch))[1])

    def update(state: LearnerState, minibatch: Minibatch, m: Array):
        denominators = hacpo.denominators(minibatch, learner, objective, forward.responses)

        def loss(trainable: Params, part: Minibatch):
            logprob, entropy = token_logprobs(forward, combine(trainable, state.frozen), part)
            value, diagnostics = hacpo.loss(logprob, part, learner, m, denominators, objective)
            return value, (diagnostics, jax.lax.stop_gradient(entropy).sum())

        def one(total, part: Minibatch):
            (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(state.trainable, part)
            return jax.tree.map(jnp.add, total, (value, gradient)), aux

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, state.trainable))
        (value, gradient), aux = jax.lax.scan(one, zero, stack(minibatch))
        norm = optax.global_norm(gradient)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        step, moments = optimizer.update(gradient, state.moments, state.trainable)
        lr = rate(state.updates)
        moved = jax.tree.map(lambda p, u: p - lr * u, state.trainable, step)
        # A non-finite loss or gradient changes nothing but the clock.
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
        state = LearnerState(
            keep(moved, state.trainable), state.frozen, keep(moments, state.moments), state.updates + 1
        )
        diagnostics, entropy = aux
        tokens = jnp.maximum(minibatch.scored.sum(), 1)
        return state, Outcome(value, norm, lr, entropy.sum() / tokens, ~finite, _unstack(diagnostics))

    return Learner(init, jax.jit(score), jax.jit(update, donate_argnums=0))


def token_logprobs(forward: Forward, params: Params, minibatch: Minibatch) -> tuple[Array, Array]:
    """Log-prob and entropy of every scored token, float32 [M, T] each, 0 elsewhere.

    Only scored positions meet the head (at most forward.responses a row), `chunk` of them at a time and recomputed in
    the backward pass: no [M, T, V] array exists. The distribution is softmax(logits / temperature) over the ids that
    the tokenizer has.
    """
    chex.assert_rank(minibatch.tokens, 2)
    hidden, _ = models.apply(
        forward.graphdef, params, minibatch.tokens, minibatch.positions, segment=minibatch.segment,
        dtype=forward.dtype, remat=forward.remat, attention=forward.attention,
    )  # fmt: skip
    M, T, D = hidden.shape
    size = min(forward.responses, T)
    where = jnp.argsort(~minibatch.scored, axis=1, stable=True)[:, :size]  # [M, size]: scored positions first
    target = jnp.take_along_axis(minibatch.tokens, where, axis=1)
    before = jnp.maximum(where - 1, 0)  # the position that predicts the token
    states = jnp.take_along_axis(hidden, before[..., None], axis=1).reshape(M * size, D)
    logprob, entropy = head_logprobs(
        models.head(params), states, target.reshape(-1), forward.vocab_size, forward.temperature, forward.chunk
    )
    rows = jnp.arange(M)[:, None]
    spread = lambda x: jnp.zeros((M, T)).at[rows, where].set(x.reshape(M, size))  # noqa: E731
    scored = minibatch.scored
    return jnp.where(scored, spread(logprob), 0.0), jnp.where(scored, spread(entropy), 0.0)


def head_logprobs(head: Array, hidden: Array, target: Array, vocab_size: int, temperature: float, chunk: int):
    """log softmax(hidden @ head.T / temperature)[target] and the entropy, each float32 [N].

    head [V, D], hidden [N, D], target [N] int32. Works through `chunk` rows at a time; the backward pass recomputes
    the logits of a chunk from hidden.
    """
    N, D = hidden.shape
    chunk = min(chunk, N)
    pad = -N % chunk
    hidden = jnp.pad(hidden, ((0, pad), (0, 0))).reshape(-1, chunk, D)
    target = jnp.pad(target, (0, pad)).reshape(-1, chunk)
    absent = jnp.arange(head.shape[0]) >= vocab_size
    head = head.astype(hidden.dtype)

    @jax.checkpoint
    def one(_, part):
        states, ids = part
        logits = jnp.einsum("nd,vd->nv", states, head, preferred_element_type=jnp.float32) / temperature
        logits = jnp.where(absent, -jnp.inf, logits)
        normalizer = jax.nn.logsumexp(logits, axis=-1)
        logprob = jnp.take_along_axis(logits, ids[:, None], axis=1)[:, 0] - normalizer
        frozen = jax.lax.stop_gradient(logits)
        probability = jnp.exp(frozen - jax.lax.stop_gradient(normalizer)[:, None])
        entropy = jax.lax.stop_gradient(normalizer) - jnp.sum(probability * jnp.where(absent, 0.0, frozen), axis=-1)
        return None, (logprob, entropy)

    _, (logprob, entropy) = jax.lax.scan(one, None, (hidden, target))
    return logprob.reshape(-1)[:N], entropy.reshape(-1)[:N]


def make_optimizer(config: OptimizerConfig, total_updates: int) -> tuple[optax.GradientTransformation, optax.Schedule]:
    """AdamW (Loshchilov and Hutter, 2019) without its step size, and the step size per update.

    They are apart because the schedule's clock goes on over a non-finite update, the moments' count does not.
    """
    clip = optax.clip_by_global_norm(config.grad_clip) if config.grad_clip else optax.identity()
    adam = optax.scale_by_adam(config.b1, config.b2, config.eps)
    decay = optax.add_decayed_weights(config.weight_decay)
    warm, after = config.warmup_steps, max(total_updates - config.warmup_steps, 1)
    match config.schedule:
        case "constant":
            main = optax.constant_schedule(config.lr)
        case "linear":
            main = optax.linear_schedule(config.lr, 0.0, after)
        case "cosine":
            main = optax.cosine_decay_schedule(config.lr, after)
    if warm:
        # The first update already moves: (u + 1) / warm.
        ramp = lambda count: config.lr * (count + 1) / warm  # noqa: E731
        main = optax.join_schedules([ramp, main], [warm])
    return optax.chain(clip, adam, decay), main


def split(params: Params) -> tuple[Params, Params]:
    """(trainable, frozen): the same tree twice, each with None where the other has a leaf."""
    mask = models.trainable(params)
    return (
        jax.tree.map(lambda leaf, trained: leaf if trained else None, params, mask),
        jax.tree.map(lambda leaf, trained: None if trained else leaf, params, mask),
    )


def combine(trainable: Params, frozen: Params) -> Params:
    return jax.tree.map(lambda a, b: b if a is None else a, trainable, frozen, is_leaf=lambda leaf: leaf is None)


def _stack(minibatch: Minibatch, size: int, mesh: Mesh) -> Minibatch:
    """[M, ...] -> [M / size, size, ...], size 0 being M. Strided, so that every device keeps its rows."""
    rows = minibatch.tokens.shape[0]
    steps = rows // (size or rows)

    def one(x: Array) -> Array:
        x = x.reshape(x.shape[0] // steps, steps, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(x, sharding(mesh, None, "batch", shape=x.shape[:2]))

    return jax.tree.map(one, minibatch)


def _unstack(tree: Any) -> Any:
    """The inverse of _stack on every leaf [steps, M / steps, ...]."""
    return jax.tree.map(lambda x: x.swapaxes(0, 1).reshape(-1, *x.shape[2:]), tree)
