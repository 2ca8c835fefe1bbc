"""Algorithm 1 of the paper: agents that answer the same prompts and learn from each other's verified answers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hacrl_jax import agent as policy
from hacrl_jax import checkpoint, exchange, groups, hacpo, journal, measure, metrics, tokenizer
from hacrl_jax.agent import Agent
from hacrl_jax.config import Config, ObjectiveConfig
from hacrl_jax.sharding import make_mesh
from hacrl_jax.tasks import data
from hacrl_jax.tasks.grader import Grader
from hacrl_jax.tasks.verify import Verdict
from hacrl_jax.types import Problem, Rollouts, UserError


@dataclass(frozen=True)
class Ability:
    """The capability window: one batch score per step and agent, oldest first. history [at most K, n] float64."""

    history: np.ndarray

    @classmethod
    def empty(cls, n: int) -> Ability:
        return cls(np.zeros((0, n)))

    def observe(self, reward: np.ndarray, objective: ObjectiveConfig) -> Ability:
        """With the step's rewards [n, N] added; all samples count, before any filter (equation 8)."""
        score = reward if objective.capability == "mean_reward" else np.where(np.isnan(reward), np.nan, reward > 0)
        if objective.capability == "mean_reward" and np.nanmin(reward) < 0:
            raise UserError(
                "objective.capability: mean_reward needs rewards of at least 0, and one was "
                f"{np.nanmin(reward):g}; use positive_rate"
            )
        rows = np.concatenate([self.history, np.nanmean(score, axis=1)[None]])
        return Ability(rows[-objective.capability_window :])


@dataclass(frozen=True)
class Summary:
    """Where a run's files are, and how many steps it has."""

    folder: Path
    steps: int


def train(config: Config, *, resume: bool = False, fresh: bool = False, show: bool = True) -> Summary:
    """Train every agent of the config on all agents' verified rollouts.

    resume continues the run folder at its last complete checkpoint; fresh moves an existing one aside. Raises UserError
    for whatever the user can mend, before anything is written.
    """
    folder = metrics.check(config, resume=resume, fresh=fresh)
    mesh = make_mesh(config.mesh)
    problems, _ = data.problems(config.data)
    steps = config.steps or data.steps_of(len(problems), batch=config.rollout.prompts, epochs=config.epochs)
    with jax.set_mesh(mesh):
        agents = [policy.create(config, k, mesh, steps * config.updates_per_step()) for k in range(len(config.agents))]
        held_out = [(settings, data.problems(settings.data)[0]) for settings in config.eval.sets]
        problems, long = readable(problems, agents)
        batches = data.batches(problems, batch=config.rollout.prompts, seed=config.seed)
        start, ability = _restore(folder, config, agents, batches) if resume else (0, Ability.empty(len(agents)))
        run = metrics.Run.open(
            config, folder, total=steps, resume_step=(start or -1) if resume else None, fresh=fresh, show=show
        )
        store = checkpoint.Store(folder / "checkpoints", config.checkpoint)
        with run, Grader(config.verifier) as grader:
            run.say(f"{len(problems)} problems, {long} left out for too long a prompt; steps {start + 1} to {steps}")
            if start == 0 and config.eval.before:
                measure.all_agents(agents, held_out, grader, 0, run)
            for step in range(start + 1, steps + 1):
                ability = train_step(next(batches), step, agents, ability, grader, config, run)
                run.progress(step)
                if _due(config.eval.every, step) or (step == steps and config.eval.after):
                    measure.all_agents(agents, held_out, grader, step, run)
                if _due(config.checkpoint.every, step) or step == steps:
                    run.sync()
                    store.save(step, *_state(agents, ability, batches, config))
            store.close()
    return Summary(folder, steps)


def train_step(problems: Sequence[Problem], step: int, agents: Sequence[Agent], ability: Ability, grader: Grader,
               config: Config, run: metrics.Run) -> Ability:  # fmt: skip
    """One step of Algorithm 1: all agents answer, the verifier judges once, every answer trains every agent."""
    page = journal.Page(step, agents, problems)
    rollouts, text, reward, verdicts = ask(problems, step, agents, grader, config.objective, page, run)
    scores = [  # before any agent's first update
        page.timed("score", agent, agent.score, problems, own) for agent, own in zip(agents, rollouts, strict=True)
    ]
    run.rollouts(step, page.rollouts(text, reward, verdicts, rollouts))
    ability = ability.observe(reward, config.objective)
    capability = hacpo.capability(ability.history, config.objective.capability_window)  # [n]
    ratio = hacpo.capability_ratio(capability)  # [n, n]
    buffer = exchange.share(rollouts, scores, reward, text)
    for agent in agents:
        rows, dropped = page.timed(
            "exchange", agent, exchange.view, buffer, *agent.prompts(problems), agent.index,
            [other.tokenizer for other in agents], ratio[agent.index], config.objective,
        )  # fmt: skip
        outcomes = [
            page.timed("update", agent, agent.update, exchange.take(rows, index), m)
            for m, index in enumerate(exchange.minibatches(config, agent.index))
        ]
        agent.sync()
        run.log(page.row(agent, buffer, capability, dropped, outcomes))
    return ability


def ask(
    problems: Sequence[Problem], step: int, agents: Sequence[Agent], grader: Grader, objective: ObjectiveConfig,
    page: journal.Page, run: metrics.Run,
) -> tuple[list[Rollouts], list[tuple[str, ...]], np.ndarray, list[Verdict]]:  # fmt: skip
    """Every agent's rollouts with their text, rewards [n, N] and verdicts (agent by agent).

    With `groups: resample`, prompts on which all rewards are equal are answered again, a bounded number of times.
    """
    rollouts = [page.timed("generate", agent, agent.generate, problems, step) for agent in agents]
    attempt = 0
    while True:
        text = [agent.text(own) for agent, own in zip(agents, rollouts, strict=True)]
        reward, verdicts = page.timed("verify", None, judge, problems, text, grader)
        spread = np.ptp(reward.reshape(len(agents), len(problems), -1), axis=(0, 2))  # [B]
        again = groups.resample(spread > hacpo.UNIFORM_TOLERANCE, attempt, objective)
        if again.message:
            run.say(f"step {step}: {again.message}")
        if not again.prompts.size:
            return rollouts, text, reward, verdicts
        attempt += 1
        fresh = [page.timed("generate", agent, agent.generate, problems, step, attempt) for agent in agents]
        chosen = np.isin(np.arange(len(problems)), again.prompts)
        rollouts = [exchange.replace(*pair, chosen) for pair in zip(rollouts, fresh, strict=True)]


def judge(
    problems: Sequence[Problem], text: Sequence[Sequence[str]], grader: Grader
) -> tuple[np.ndarray, list[Verdict]]:
    """Rewards [n, N] float64, and the verdicts agent by agent: all answers of the step in one go."""
    samples = len(text[0]) // len(problems)
    golds = [problem.gold for problem in problems for _ in range(samples)] * len(text)
    verdicts = grader.grade(golds, [answer for answers in text for answer in answers])
    return np.asarray([float(verdict.correct) for verdict in verdicts]).reshape(len(text), -1), verdicts


def readable(problems: Sequence[Problem], agents: Sequence[Agent]) -> tuple[list[Problem], int]:
    """The problems whose prompt every agent can read, and how many were left out: for all agents together."""
    limit = agents[0].config.rollout.max_prompt
    kept = [
        problem for problem in problems
        if all(len(tokenizer.render(agent.tokenizer, problem)) <= limit for agent in agents)
    ]  # fmt: skip
    if not kept:
        raise UserError(f"data: every prompt is longer than rollout.max_prompt {limit}; raise it")
    return kept, len(problems) - len(kept)


def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0


def _state(agents: Sequence[Agent], ability: Ability, batches: Any, config: Config) -> tuple[Any, dict[str, Any]]:
    """All that a later step depends on: (arrays, JSON record)."""
    record = {"seed": config.seed, "ability": ability.history.tolist(), "data": batches.get_state()}
    return {agent.name: agent.state for agent in agents}, record


def _restore(folder: Path, config: Config, agents: Sequence[Agent], batches: Any) -> tuple[int, Ability]:
    """(last complete step or 0, capability window), with agents and data iterator set to that step."""
    store = checkpoint.Store(folder / "checkpoints", config.checkpoint)
    restored = store.restore({agent.name: agent.state for agent in agents})
    store.close()
    if restored is None:
        return 0, Ability.empty(len(agents))
    for agent in agents:
        agent.state = restored.arrays[agent.name]
        agent.sync()
    batches.set_state(restored.record["data"])
    return restored.step, Ability(np.asarray(restored.record["ability"], np.float64))
