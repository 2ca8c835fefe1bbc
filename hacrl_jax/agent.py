"""One policy: its tokenizer, its sampler engine, its learner, and the state that training moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from hacrl_jax import exchange, learner, models, tokenizer
from hacrl_jax.config import Config, EvalSet
from hacrl_jax.learner import Learner, LearnerState, Outcome
from hacrl_jax.sampler.engine import Engine
from hacrl_jax.sampler.rollout import rollout
from hacrl_jax.sampler.sampling import sampling
from hacrl_jax.sharding import agent_mesh, replicated
from hacrl_jax.tokenizer import Tokenizer
from hacrl_jax.types import Array, Minibatch, Params, Problem, Rollouts

PURPOSES = {"train": 0, "eval": 1}
HOST, DEVICE = "pinned_host", "device"  # kinds of memory


@dataclass
class Agent:
    """state, sampler_params and longer are the only fields that change after ``create``."""

    name: str
    index: int
    folder: Any  # where the model came from: tokenizer files and config for export
    config: Config
    model: models.DecoderConfig
    graphdef: Any
    tokenizer: Tokenizer
    engine: Engine
    learner: Learner
    mesh: Mesh
    run_mesh: Mesh  # where what agents share lies; the same devices
    state: LearnerState
    sampler_params: Params  # the compute-dtype copy that the engine reads
    reference: Params | None  # the initial policy in compute dtype; None when nothing reads it
    longer: Engine | None = None  # made by the first evaluation with a longer max_response than training's

    def prompts(self, problems: Sequence[Problem]) -> tuple[Array, Array]:
        """The problems as this agent reads them: ([B, P] int32 right-padded, [B] lengths)."""
        rendered = [tokenizer.render(self.tokenizer, problem) for problem in problems]
        tokens = np.zeros((len(rendered), self.config.rollout.max_prompt), np.int32)
        for row, ids in zip(tokens, rendered, strict=True):
            row[: len(ids)] = ids
        return jnp.asarray(tokens), jnp.asarray([len(ids) for ids in rendered], jnp.int32)

    def generate(self, problems: Sequence[Problem], step: int, attempt: int = 0) -> Rollouts:
        """G training samples of each problem from the policy of this step; everything stays on the device."""
        settings = self.config.rollout
        with jax.set_mesh(self.mesh):
            key = sample_key(self.config.seed, self.index, PURPOSES["train"], step, attempt)
            rollouts = rollout(
                self.engine, self.copy, *self.prompts(problems), problem_ids(problems), key,
                samples=settings.samples, temperature=settings.temperature,
            )  # fmt: skip
        return self._shared(rollouts)

    def answer(self, problems: Sequence[Problem], settings: EvalSet, step: int, samples: int) -> Rollouts:
        """samples answers of each problem under an evaluation's sampling settings."""
        longest = settings.max_response or self.config.rollout.max_response
        with jax.set_mesh(self.mesh):
            key = sample_key(self.config.seed, self.index, PURPOSES["eval"], step, 0)
            return rollout(
                self._engine(longest), self.copy, *self.prompts(problems), problem_ids(problems), key,
                samples=samples, temperature=settings.temperature, top_p=settings.top_p, top_k=settings.top_k,
                min_p=settings.min_p, max_response=longest,
            )  # fmt: skip

    def warm_up(self, evaluations: Sequence[EvalSet]) -> Iterator[str]:
        """Compile what the sampler will need, so that nothing compiles later; yields the name of each program."""
        choices = {"plain": sampling(self.config.rollout.temperature)}
        for own in evaluations:
            choice = sampling(own.temperature, own.top_p, own.top_k, own.min_p)
            choices.setdefault(choice.mode, choice)
        programs = self.engine.warm_up(self.copy, tuple(choices.values()))
        while True:
            with jax.set_mesh(self.mesh):
                name = next(programs, None)
            if name is None:
                return
            yield name

    def _engine(self, max_response: int) -> Engine:
        """The engine of training, or one with room for longer answers: an evaluation may allow them."""
        if max_response <= self.config.rollout.max_response:
            return self.engine
        if self.longer is None or self.longer.config.max_response < max_response:
            longer = self.config.rollout.model_copy(update={"max_response": max_response})
            self.longer = Engine(
                self.graphdef, self.model, self.state.params, eos=self.tokenizer.eos,
                vocab_size=self.tokenizer.vocab_size, config=longer, mesh=self.mesh, dtype=self.engine.dtype,
                axes=models.abstract(self.model, self.config.agents[self.index].lora)[2],
            )  # fmt: skip
        return self.longer

    def text(self, rollouts: Rollouts) -> tuple[str, ...]:
        """The responses as text, without the EOS that ended them: for verification, logs and other tokenizers."""
        ids, length, stopped = jax.device_get((rollouts.response, rollouts.length, rollouts.stopped))
        ends = length - stopped
        return tuple(tokenizer.decode(self.tokenizer, row[:end].tolist()) for row, end in zip(ids, ends, strict=True))

    def score(self, problems: Sequence[Problem], rollouts: Rollouts) -> Array:
        """Log-probs [N, R] of its own responses under the current policy, in the rows and shapes of the updates; with
        `source_logprob: sampler` those that came with the samples."""
        if self.config.objective.source_logprob == "sampler":
            return rollouts.logprob
        prompts, prompt_length = self.prompts(problems)
        rows = exchange.own_rows(rollouts, prompts, prompt_length)
        size, params = self.config.minibatch * self.config.rollout.samples, self.params
        parts = [exchange.take(rows, index) for index in np.arange(rows.tokens.shape[0]).reshape(-1, size)]
        with jax.set_mesh(self.mesh):
            scored = [self.learner.score(params, self._own(part)) for part in parts]
        scored = self._shared(scored)
        return exchange.response_part(jnp.concatenate(scored), prompt_length, responses=rollouts.response.shape[1])

    def update(self, part: Minibatch, m: int) -> Outcome:
        """One optimizer update, number m of this step; what it tells stays on the device."""
        self.state = moved(self.state, DEVICE)
        with jax.set_mesh(self.mesh):
            part = self._own(part)
            if self.reference is not None:
                reference = self.learner.score(self.reference_params(), part)
                part = part.replace(reference_token_logprob=reference)
            self.state, outcome = self.learner.update(self.state, part, jnp.asarray(m, jnp.int32))
        return self._shared(outcome)

    def _own(self, tree: Any) -> Any:
        """Arrays that all agents share, replicated, as arrays of this agent's mesh; the devices have them already."""
        return tree if self.mesh == self.run_mesh else jax.device_put(tree, replicated(self.mesh))

    def _shared(self, tree: Any) -> Any:
        return tree if self.mesh == self.run_mesh else jax.device_put(tree, replicated(self.run_mesh))

    def reference_params(self) -> Params:
        return learner.combine(moved(self.reference, DEVICE), self.state.frozen)

    def sync(self) -> None:
        """The end of a turn: cast the learner's parameters into the sampler's old copy, and make room (offload)."""
        previous = None if self.config.agents[self.index].offload == "all" else self.sampler_params
        self.sampler_params = self.engine.load_params(self.params, previous)
        self.make_room()

    @property
    def params(self) -> Params:
        """The learner's parameters, fetched to the device where they wait in host memory."""
        return moved(self.state.params, DEVICE)

    @property
    def copy(self) -> Params:
        """The sampler's copy, fetched to the device where it waits in host memory."""
        return moved(self.sampler_params, DEVICE)

    def make_room(self) -> None:
        """Send to host memory what no other agent's turn needs, as `offload` says."""
        match self.config.agents[self.index].offload:
            case "none":
                return
            case "moments":
                self.state = self.state.replace(moments=moved(self.state.moments, HOST))
            case "all":
                self.state, self.reference = moved(self.state, HOST), moved(self.reference, HOST)
                self.sampler_params = moved(self.sampler_params, HOST)


def create(config: Config, index: int, mesh: Mesh, total_updates: int) -> Agent:
    """Load one agent of the config: tokenizer, weights, programs. UserError where something does not fit."""
    own = agent_mesh(config, index, mesh)
    with jax.set_mesh(own):
        return _create(config, index, own, mesh, total_updates)


def _create(config: Config, index: int, mesh: Mesh, run_mesh: Mesh, total_updates: int) -> Agent:
    settings = config.agents[index]
    folder = models.resolve(settings.model, settings.revision)
    graphdef, model, params = models.load(folder, mesh=mesh, lora=settings.lora)
    tok = tokenizer.load(folder, settings.prompt)
    dtype = compute_dtype(settings.dtype)
    programs, engine = build(
        config, index, graphdef, model, params, tok.vocab_size, tok.eos, dtype, mesh, total_updates
    )  # fmt: skip
    state = programs.init(params)
    reference = None
    if config.objective.kl_coefficient:
        # Under LoRA the initial policy is the base: its adapters are zero, and the base itself is shared.
        zeros = settings.lora is not None
        reference = jax.tree.map(lambda x: jnp.zeros_like(x) if zeros else jnp.array(x, dtype), state.trainable)
    agent = Agent(
        settings.name, index, folder, config, model, graphdef, tok, engine, programs, mesh, run_mesh,
        state, engine.load_params(params), reference,
    )  # fmt: skip
    agent.make_room()
    return agent


def build(
    config: Config, index: int, graphdef: Any, model: models.DecoderConfig, params: Params, vocab_size: int,
    eos: tuple[int, ...], dtype: Any, mesh: Mesh, total_updates: int,
) -> tuple[Learner, Engine]:  # fmt: skip
    """The programs of an agent. Of params only shapes and shardings are read."""
    settings = config.agents[index]
    forward = learner.Forward(
        graphdef, vocab_size, config.rollout.temperature, dtype, settings.logprob_chunk, config.rollout.max_response,
        settings.remat, settings.attention, exchange.shared(config, index),
    )  # fmt: skip
    programs = learner.build(forward, settings, config.objective, index, mesh, total_updates)
    engine = Engine(
        graphdef, model, params, eos=eos, vocab_size=vocab_size, config=config.rollout, mesh=mesh, dtype=dtype,
        axes=models.abstract(model, settings.lora)[2],
    )  # fmt: skip
    return programs, engine


def moved(tree: Any, kind: str) -> Any:
    """A tree of arrays in another kind of memory of the same devices; arrays that are there already are the same."""
    return jax.tree.map(
        lambda x: x if x.sharding.memory_kind == kind else jax.device_put(x, x.sharding.with_memory_kind(kind)), tree
    )


def compute_dtype(name: str) -> Any:
    """`auto` is bfloat16 on accelerators and float32 on CPU."""
    if name == "auto":
        name = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(name)


def sample_key(seed: int, agent: int, purpose: int, step: int, attempt: int) -> Array:
    """The base key of one call; the sampler folds in problem id, sample and position."""
    return _fold(seed, np.asarray([agent, purpose, step, attempt], np.uint32))


@partial(jax.jit, static_argnums=0)
def _fold(seed: int, path: Array) -> Array:
    return jax.lax.fori_loop(0, path.shape[0], lambda i, key: jax.random.fold_in(key, path[i]), jax.random.key(seed))


def problem_ids(problems: Sequence[Problem]) -> Array:
    return jnp.asarray([problem.id for problem in problems], jnp.int32)
