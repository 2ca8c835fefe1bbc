"""Updates of a finished step once more, from a run's files: the same numbers without sampling or verification.

A step's update of one agent depends on its state before the step, the shared buffer and the capability window. The
state is the newest checkpoint before the step, carried forward by the buffers in between.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hacrl_jax import agent as policy
from hacrl_jax import archive, checkpoint, exchange, guard, hacpo, metrics, resuming, tokenizer
from hacrl_jax.agent import Agent
from hacrl_jax.algorithm import Ability
from hacrl_jax.config import Config, load
from hacrl_jax.learner import Outcome
from hacrl_jax.models import resolve
from hacrl_jax.sharding import check_agents, make_mesh
from hacrl_jax.tasks import data
from hacrl_jax.tokenizer import Tokenizer
from hacrl_jax.types import UserError

KEYS = ("loss", "grad_norm", "entropy", "lr")


@dataclass(frozen=True)
class Replayed:
    """One agent's updates of a step: each as a row of numbers, their means, and what the run itself logged."""

    agent: str
    updates: tuple[dict[str, Any], ...]
    means: dict[str, float]
    recorded: dict[str, float] | None

    @property
    def exact(self) -> bool:
        return self.recorded == self.means


def replay(folder: Path, step: int, names: Sequence[str] = (), overrides: Sequence[str] = (),
           say: checkpoint.Say = print) -> list[Replayed]:  # fmt: skip
    """Rebuild the updates of a step for the named agents (none: all).

    overrides change the run's config from the checkpoint on, for instance the objective, to see what another setting
    would have made of the same answers. Raises UserError where a file that is needed is gone.
    """
    config = load(folder / "config.yaml", list(overrides))
    known = [agent.name for agent in config.agents]
    if unknown := [name for name in names if name not in known]:
        raise UserError(f"--agent: no agent {unknown[0]!r} in {folder}; there are {', '.join(known)}")
    archive.read(folder / "rollouts" / archive.name(step))  # before models are loaded: is it there?
    mesh = make_mesh(config.mesh)
    check_agents(config, mesh)
    with jax.set_mesh(mesh), guard.memory("load"):
        tokenizers = [tokenizer.load(resolve(own.model, own.revision), own.prompt) for own in config.agents]
        total = _steps(config) * config.updates_per_step()
        agents = [policy.create(config, k, mesh, total) for k, name in enumerate(known) if name in (names or known)]
        start, ability = _before(folder, config, agents, step, say)
        for now in range(start + 1, step + 1):
            say(f"step {now}")
            outcomes, ability = _learn(folder, now, agents, tokenizers, ability, config)
        logged = [row for row in metrics.read(folder / "metrics.jsonl") if row["step"] == step and "loss" in row]
    return [_compare(agent, outcomes[agent.name], logged) for agent in agents]


def _before(folder: Path, config: Config, agents: Sequence[Agent], step: int,
            say: checkpoint.Say) -> tuple[int, Ability]:  # fmt: skip
    """(step, capability window) of the newest state before `step` that the files allow; the agents are set to it."""
    with checkpoint.Store(resuming.place(config, folder), config.checkpoint, write=False) as store:
        restored = resuming.load(store, agents, resuming.first_weights(agents), say, last=step - 1)
    if restored is None:
        say("from the first weights: no checkpoint is older")
        return 0, Ability(np.zeros((0, len(config.agents))))
    say(f"from the checkpoint of step {restored.step}")
    return restored.step, Ability(np.asarray(restored.record["ability"]).reshape(-1, len(config.agents)))


def _learn(folder: Path, step: int, agents: Sequence[Agent], tokenizers: Sequence[Tokenizer], ability: Ability,
           config: Config) -> tuple[dict[str, list[Outcome]], Ability]:  # fmt: skip
    """One step's updates of every agent, as algorithm.train_step does them."""
    problems, buffer, reward = archive.read(folder / "rollouts" / archive.name(step))
    ability = ability.observe(reward, config.objective)
    ratio = hacpo.capability_ratio(hacpo.capability(ability.history, config.objective.capability_window))
    outcomes = {}
    for agent in agents:
        rows, _ = exchange.view(
            buffer, *agent.prompts(problems), agent.index, tokenizers, ratio[agent.index], config.objective
        )
        parts = enumerate(exchange.minibatches(config, agent.index))
        # One program at a time, as in training: CPU devices that wait for each other in two of them wait for ever.
        outcomes[agent.name] = [
            jax.block_until_ready(agent.update(exchange.take(rows, index), m)) for m, index in parts
        ]
    return outcomes, ability


def _compare(agent: Agent, outcomes: Sequence[Outcome], logged: Sequence[dict[str, Any]]) -> Replayed:
    numbers = jax.device_get([outcome.replace(diagnostics=None) for outcome in outcomes])
    rows = [
        {"update": m, **{key: float(getattr(one, key)) for key in KEYS}, "nonfinite": bool(one.nonfinite)}
        for m, one in enumerate(numbers)
    ]
    means = {key: np.mean([getattr(one, key) for one in numbers]).item() for key in KEYS}  # as the journal does it
    row = next((row for row in logged if row["agent"] == agent.name), None)
    return Replayed(agent.name, tuple(rows), means, row and {key: row[key] for key in KEYS})


def _steps(config: Config) -> int:
    if config.steps or all(agent.optimizer.schedule == "constant" for agent in config.agents):
        return config.steps or 1
    problems, _ = data.problems(config.data)
    return data.steps_of(len(problems), batch=config.rollout.prompts, epochs=config.epochs)
