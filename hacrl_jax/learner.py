"""The learner: token log-probs, the loss of a minibatch, and one jitted, donated update.

Everything is a pure function of (LearnerState, Minibatch); ``build`` closes over what is static (graph, settings) and
returns the two compiled programs that an agent runs. The arithmetic of the loss is hacpo.loss.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh

from hacrl_jax import hacpo, models, packing
from hacrl_jax.config import AgentConfig, ObjectiveConfig, OptimizerConfig
from hacrl_jax.logprobs import head_logprobs
from hacrl_jax.sharding import parts, replicated, sharding
from hacrl_jax.types import Array, Minibatch, Params

TOKENS = 2048  # of a micro-batch on one CPU, about: what a layer makes of more does not stay in the caches
SHORT = 512  # tokens of a row there up to which nothing is computed again: all layers' attention weights fit in memory


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

    abstract(params) -> init's state as ShapeDtypeStructs with shardings; params are arrays or such structs.
    score(params, minibatch) -> log-probs [M, T] of the scored tokens under params, by the update's own forward.
    update(state, minibatch, m) -> (state, Outcome); state is donated; m counts this learner's updates of the step.
    """

    init: Callable[[Params], LearnerState]
    abstract: Callable[[Params], LearnerState]
    score: Callable[[Params, Minibatch], Array]
    update: Callable[[LearnerState, Minibatch, Array], tuple[LearnerState, Outcome]]


@dataclass(frozen=True)
class Forward:
    """The static half of a forward pass: what a log-prob depends on besides parameters and tokens."""

    graphdef: Any
    vocab_size: int  # ids the tokenizer has; higher rows of the head have no probability
    temperature: float
    dtype: Any
    chunk: int  # ids of the vocabulary whose logits exist at one time
    responses: int  # scored tokens of a row at most, R; other positions never meet the head
    remat: str = "none"  # auto: _layout decides
    attention: str = "xla"
    group: int = 1  # so many rows of a minibatch in turn have the same prompt, which is then computed once


def build(forward: Forward, agent: AgentConfig, objective: ObjectiveConfig, learner: int, mesh: Mesh,
          total_updates: int) -> Learner:  # fmt: skip
    """The programs of learner number `learner`; total_updates is the length of the learning-rate schedule."""
    optimizer, rate = make_optimizer(agent.optimizer, total_updates)

    def fresh(params: Params) -> LearnerState:
        trainable, frozen = split(params)
        return LearnerState(trainable, frozen, optimizer.init(trainable), jnp.zeros((), jnp.int32))

    def abstract(params: Params) -> LearnerState:
        state = jax.eval_shape(fresh, params)
        trainable, frozen = split(params)
        at = lambda leaf, place: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)  # noqa: E731
        beside = lambda part: jax.tree.structure(part) == jax.tree.structure(trainable)  # noqa: E731

        def place(part: Any) -> Any:  # moments lie beside their parameters, counts everywhere
            if beside(part):
                return jax.tree.map(lambda leaf, own: at(leaf, own.sharding), part, trainable)
            return at(part, replicated(mesh))

        moments = jax.tree.map(place, state.moments, is_leaf=beside)
        return LearnerState(trainable, frozen, moments, at(state.updates, replicated(mesh)))

    def init(params: Params) -> LearnerState:
        # Moments are made where they will lie: twice as large as the parameters, they may not fit on one device.
        trainable, frozen = split(params)
        places = jax.tree.map(lambda leaf: leaf.sharding, abstract(params))
        moments = jax.jit(optimizer.init, out_shardings=places.moments)(trainable)
        return LearnerState(trainable, frozen, moments, jax.device_put(jnp.zeros((), jnp.int32), places.updates))

    def score(params: Params, minibatch: Minibatch) -> Array:
        trunk, work, loosen, _ = _layout(forward, agent, mesh, minibatch)
        params = loosen(params)
        _, logprob = _each(work, 0.0, lambda part: (0.0, token_logprobs(trunk, params, part)[0]))
        return jax.lax.with_sharding_constraint(work.tokens(logprob), replicated(mesh))

    def update(state: LearnerState, minibatch: Minibatch, m: Array):
        denominators = hacpo.denominators(minibatch, learner, objective, forward.responses)
        trunk, work, loosen, fasten = _layout(forward, agent, mesh, minibatch)
        trained, frozen = split(loosen(state.params))

        def loss(trainable: Params, part: Minibatch):
            logprob, entropy = token_logprobs(trunk, combine(trainable, frozen), part)
            value, diagnostics = hacpo.loss(logprob, part, learner, m, denominators, objective)
            return value, (diagnostics, jax.lax.stop_gradient(entropy).sum())

        def one(part: Minibatch):
            (value, aux), gradient = jax.value_and_grad(loss, has_aux=True)(trained, part)
            return (value, gradient), aux

        zero = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, trained))
        (value, gradient), (diagnostics, entropy) = _each(work, zero, one)
        gradient = fasten(gradient)
        norm = optax.tree.norm(gradient)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        step, moments = optimizer.update(gradient, state.moments, state.trainable)
        lr = rate(state.updates)
        moved = jax.tree.map(lambda p, u: p - lr * u, state.trainable, step)
        # A non-finite loss or gradient changes nothing but the clock.
        keep = lambda new, old: jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)  # noqa: E731
        state = LearnerState(
            keep(moved, state.trainable), state.frozen, keep(moments, state.moments), state.updates + 1
        )
        tokens = jnp.maximum(minibatch.scored.sum(), 1)
        diagnostics = jax.tree.map(work.sequences, diagnostics)
        outcome = Outcome(value, norm, lr, entropy.sum() / tokens, ~finite, diagnostics)
        # Replicated, so that every host can read it.
        return state, jax.lax.with_sharding_constraint(outcome, replicated(mesh))

    return Learner(init, abstract, jax.jit(score), jax.jit(update, donate_argnums=0))


def token_logprobs(forward: Forward, params: Params, minibatch: Minibatch) -> tuple[Array, Array]:
    """Log-prob and entropy of every scored token, float32 [M, T] each, 0 elsewhere.

    Only scored positions meet the head (at most forward.responses in a row of one sequence). The distribution is
    softmax(logits / temperature) over the ids that the tokenizer has.
    """
    chex.assert_rank(minibatch.tokens, 2)
    M, T = minibatch.tokens.shape
    hidden = partial(models.apply, forward.graphdef, params, dtype=forward.dtype, remat=forward.remat)
    if forward.group > 1:
        *rows, segment, where = packing.behind_prompts(minibatch, forward.group, forward.responses)
        states, _ = hidden(*rows, segment=segment, shared=(T - forward.responses, forward.group))
        states = states.reshape(M, forward.responses, -1)
    else:
        size = min(forward.responses, T) if minibatch.valid.shape[1] == 1 else T
        where = jnp.argsort(~minibatch.scored, axis=1, stable=True)[:, :size]  # [M, size]: scored positions first
        before = jnp.maximum(where - 1, 0)  # the position that predicts the token
        states, _ = hidden(
            minibatch.tokens, minibatch.positions, segment=minibatch.segment, attention=forward.attention,
            queries=before,
        )  # fmt: skip
    target = jnp.take_along_axis(minibatch.tokens, where, axis=1)
    logprob, entropy = head_logprobs(
        models.head(params), states, target, forward.vocab_size, forward.temperature, forward.chunk
    )
    rows = jnp.arange(M)[:, None]
    spread = lambda x: jnp.zeros((M, T)).at[rows, where].set(x)  # noqa: E731
    scored = minibatch.scored
    return jnp.where(scored, spread(logprob), 0.0), jnp.where(scored, spread(entropy), 0.0)


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


class Work(NamedTuple):
    """A minibatch cut into micro-batches: leaves [steps, rows, ...], of which the first `count` hold something."""

    parts: Minibatch
    count: int | Array
    tokens: Callable[[Array], Array]  # token values [steps, rows, T] to the minibatch's own rows [M, T]
    sequences: Callable[[Array], Array]  # values of sequences [steps, rows, S] to the minibatch's own rows [M, 1]


class Layout(NamedTuple):
    forward: Forward  # with a policy for remat
    work: Work
    loosen: Callable[[Params], Params]  # from stacked parameters to what the forward reads
    fasten: Callable[[Params], Params]  # and back


def _layout(forward: Forward, agent: AgentConfig, mesh: Mesh, minibatch: Minibatch) -> Layout:
    """How a minibatch goes through the decoder on this mesh.

    On one CPU, what stands around the products counts: micro-batches fit the caches, and layers are not scanned where
    nothing is computed again (6 layers of width 256, 32 rows of 192 tokens: 0.85 of the time). Elsewhere they are, for
    XLA's CPU backend would compute again at once, and keep, what it should not: unrolled, `full` saves no memory.
    """
    M, T = minibatch.tokens.shape
    cpu = mesh.size == 1 and mesh.devices.flat[0].platform == "cpu"
    prompt = T - forward.responses
    group = forward.group if prompt > 0 and not agent.packing and forward.attention == "xla" else 1
    if cpu and not agent.micro_batch:
        size, group = _cached_rows(M, prompt, forward.responses, group)
    else:
        size = agent.micro_batch or M
        group = math.gcd(group, size // parts("batch", size))  # a group lies on one device
    if forward.remat == "auto":
        forward = replace(forward, remat="none" if cpu and T <= SHORT else "dots")
    forms = (models.unstack, models.stack) if cpu and forward.remat == "none" else (lambda params: params,) * 2
    return Layout(replace(forward, group=group), _arrange(minibatch, size, group, agent.packing, mesh), *forms)


def _arrange(minibatch: Minibatch, size: int, group: int, packed: bool, mesh: Mesh) -> Work:
    """Micro-batches of `size` rows, padded as they are with groups of so many in turn kept together, or packed."""
    M = minibatch.tokens.shape[0]

    def on_mesh(x: Array) -> Array:
        return jax.lax.with_sharding_constraint(x, sharding(mesh, None, "batch", shape=x.shape[:2]))

    if packed:
        places = packing.place(packing.lengths_of(minibatch), minibatch.tokens.shape[1])
        rows = jax.tree.map(lambda x: on_mesh(x.reshape(-1, size, *x.shape[1:])), packing.pack(minibatch, places))
        return Work(
            rows, -(-places.used // size),
            tokens=lambda x: packing.unpack_tokens(_rows(x), places, minibatch.scored),
            sequences=lambda x: packing.unpack_sequences(_rows(x), places),
        )  # fmt: skip
    steps, groups = M // size, size // group

    def cut(x: Array) -> Array:
        # Strided, so that every device keeps its rows.
        x = x.reshape(groups, steps, group, *x.shape[1:]).swapaxes(0, 1)
        return on_mesh(x.reshape(steps, size, *x.shape[3:]))

    def back(x: Array) -> Array:
        return _rows(_rows(x.reshape(steps, groups, group, *x.shape[2:]).swapaxes(0, 1)))

    return Work(jax.tree.map(cut, minibatch), steps, tokens=back, sequences=back)


def _cached_rows(rows: int, prompt: int, response: int, group: int) -> tuple[int, int]:
    """(rows of a micro-batch, group): the most that make TOKENS at most, a prompt counted once in its group."""
    divisors = lambda n, length: max(  # noqa: E731
        (d for d in range(1, n + 1) if n % d == 0 and length(d) <= TOKENS), default=1
    )
    group = divisors(group, lambda d: prompt + d * response)
    return group * divisors(rows // group, lambda d: d * (prompt + group * response)), group


def _each(work: Work, zero: Any, function: Callable[[Minibatch], tuple[Any, Any]]) -> tuple[Any, Any]:
    """(sum of the first results, the second ones stacked [steps, ...]) of function over the micro-batches.

    A loop of `count` turns, so that the unused rows of a packed minibatch cost nothing; it is never differentiated.
    """
    steps = work.parts.tokens.shape[0]
    if steps == 1:
        value, aux = function(jax.tree.map(lambda x: x[0], work.parts))
        return value, jax.tree.map(lambda x: x[None], aux)
    shapes = jax.eval_shape(function, jax.tree.map(lambda x: x[0], work.parts))[1]
    blank = jax.tree.map(lambda x: jnp.zeros((steps, *x.shape), x.dtype), shapes)

    def turn(i: Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
        total, everything = carry
        value, aux = function(jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, i, keepdims=False), work.parts))
        put = lambda whole, x: jax.lax.dynamic_update_index_in_dim(whole, x, i, 0)  # noqa: E731
        return jax.tree.map(jnp.add, total, value), jax.tree.map(put, everything, aux)

    return jax.lax.fori_loop(0, work.count, turn, (zero, blank))


def _rows(x: Array) -> Array:
    """[a, b, ...] -> [a * b, ...]."""
    return x.reshape(-1, *x.shape[2:])
