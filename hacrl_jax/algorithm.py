"""Algorithm 1 of the paper: agents that answer the same prompts and learn from each other's verified answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import numpy as np

from hacrl_jax import exchange, frame, groups, guard, hacpo, hosts, journal, metrics
from hacrl_jax.agent import Agent
from hacrl_jax.config import Config, ObjectiveConfig, RewardConfig
from hacrl_jax.tasks import rewards
from hacrl_jax.tasks.grader import Grader
from hacrl_jax.tasks.verify import Verdict
from hacrl_jax.types import Problem, Rollouts, UserError

Judge = Callable[..., tuple[np.ndarray, list[Verdict]]]  # judge, with all but its first three arguments bound


@dataclass(frozen=True)
class Ability:
    """The capability window: one batch score per step and agent, oldest first. history [at most K, n] float64."""

    history: np.ndarray

    def observe(self, reward: np.ndarray, objective: ObjectiveConfig) -> Ability:
        """With the step's rewards [n, N] added; all samples count, before any filter (equation 8)."""
        score = reward if objective.capability == "mean_reward" else np.where(np.isnan(reward), np.nan, reward > 0)
        if objective.capability == "mean_reward" and (reward < 0).any():
            raise UserError(
                "objective.capability: mean_reward needs rewards of at least 0, and one was "
                f"{np.nanmin(reward):g}; use positive_rate"
            )
        scored = ~np.isnan(reward)
        # An agent with no answer that could be scored is taken to be as able as it was.
        last = self.history[-1] if len(self.history) else np.zeros(len(reward))
        mean = np.where(scored, score, 0.0).sum(axis=1) / np.maximum(scored.sum(axis=1), 1)
        row = np.where(scored.any(axis=1), mean, last)
        return Ability(np.concatenate([self.history, row[None]])[-objective.capability_window :])


@dataclass(frozen=True)
class Summary:
    """Where a run's files are, how many steps it has, and whether this host wrote the files."""

    folder: Path
    steps: int
    writes: bool


@hosts.together
def train(config: Config, *, resume: bool = False, fresh: bool = False, show: bool = True) -> Summary:
    """Train every agent of the config on all agents' verified rollouts.

    resume continues the run folder at its last complete checkpoint; fresh moves an existing one aside. Raises UserError
    for whatever the user can mend, before anything is written.
    """
    with frame.opened(config, resume=resume, fresh=fresh, show=show) as run:
        verdicts = partial(judge, grader=run.grader, config=run.config.reward, custom=run.custom, say=run.output.say)
        ability = Ability(run.mark.history)
        for step, problems in run.steps():
            ability = train_step(problems, step, run.agents, ability, verdicts, run.config, run.output, run.watch)
            run.done(step, ability.history)
    return Summary(run.output.folder, run.total, run.output.writes)


def train_step(problems: Sequence[Problem], step: int, agents: Sequence[Agent], ability: Ability, judge: Judge,
               config: Config, run: metrics.Run, watch: guard.Watch) -> Ability:  # fmt: skip
    """One step of Algorithm 1: all agents answer, the verifier judges once, every answer trains every agent."""
    page = journal.Page(step, agents, problems, watch)
    rollouts, text, reward, verdicts = ask(problems, step, agents, judge, config.objective, page, run)
    scores = [  # before any agent's first update
        page.timed("score", agent, agent.score, problems, own) for agent, own in zip(agents, rollouts, strict=True)
    ]
    ability = ability.observe(reward, config.objective)
    capability = hacpo.capability(ability.history, config.objective.capability_window)  # [n]
    ratio = hacpo.capability_ratio(capability)  # [n, n]
    buffer = exchange.share(rollouts, scores, reward, text)
    page.keep(run, buffer, reward, verdicts)  # on disk before any update
    for agent in agents:
        rows, crossings = page.timed(
            "exchange", agent, exchange.view, buffer, *agent.prompts(problems), agent.index,
            [other.tokenizer for other in agents], ratio[agent.index], config.objective,
        )  # fmt: skip
        outcomes = [
            page.timed("update", agent, agent.update, exchange.take(rows, index), m)
            for m, index in enumerate(exchange.minibatches(config, agent.index))
        ]
        agent.sync()
        page.guard(agent, rows, outcomes)
        run.log(page.row(agent, buffer, capability, crossings, outcomes))
    return ability


def ask(
    problems: Sequence[Problem], step: int, agents: Sequence[Agent], judge: Judge, objective: ObjectiveConfig,
    page: journal.Page, run: metrics.Run,
) -> tuple[list[Rollouts], list[tuple[str, ...]], np.ndarray, list[Verdict]]:  # fmt: skip
    """Every agent's rollouts with their text, rewards [n, N] and verdicts (agent by agent).

    With `groups: resample`, prompts on which all rewards are equal are answered again, a bounded number of times.
    """
    rollouts = [page.timed("generate", agent, agent.generate, problems, step) for agent in agents]
    attempt = 0
    while True:
        text = [agent.text(own) for agent, own in zip(agents, rollouts, strict=True)]
        reward, verdicts = page.timed("verify", None, judge, problems, rollouts, text)
        spread = rewards.spread(reward.reshape(len(agents), len(problems), -1))  # [B]
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
    problems: Sequence[Problem], rollouts: Sequence[Rollouts], text: Sequence[Sequence[str]], *, grader: Grader,
    config: RewardConfig, custom: Sequence[rewards.CustomReward], say: Callable[[str], None],
) -> tuple[np.ndarray, list[Verdict]]:  # fmt: skip
    """Rewards [n, N] float64 (NaN: not scorable), and the verdicts agent by agent: all answers of the step in one go.

    The reward is the same for every learner. Lengths are tokens of the agent that answered, the final EOS included.
    """
    samples = len(text[0]) // len(problems)
    asked = [problem for problem in problems for _ in range(samples)] * len(text)
    answers = [answer for own in text for answer in own]
    verdicts = hosts.spread(Verdict, grader.grade, [problem.gold for problem in asked], answers)
    found = None
    if jax.process_index() == 0:  # one host calls the custom functions, with the whole batch, and tells the others
        lengths = np.concatenate(jax.device_get([own.length for own in rollouts])).tolist()
        found = rewards.reward(config, asked, answers, verdicts, lengths, custom)
        for function in custom:
            function.tell(say)
    found = hosts.gather("rewards", found)[0]
    return np.asarray(found, np.float64).reshape(len(text), -1), verdicts  # None becomes NaN
