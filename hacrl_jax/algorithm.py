"""Algorithm 1 of the paper: agents that answer the same prompts and learn from each other's verified answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hacrl_jax import agent as policy
from hacrl_jax import checkpoint, evaluate, exchange, groups, guard, hacpo, hosts, journal, metrics, resuming, tokenizer
from hacrl_jax.agent import Agent
from hacrl_jax.config import Config, ObjectiveConfig, RewardConfig
from hacrl_jax.sharding import check_agents, make_mesh
from hacrl_jax.tasks import data, rewards
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
    """Where a run's files are, and how many steps it has."""

    folder: Path
    steps: int


@hosts.together
def train(config: Config, *, resume: bool = False, fresh: bool = False, show: bool = True) -> Summary:
    """Train every agent of the config on all agents' verified rollouts.

    resume continues the run folder at its last complete checkpoint; fresh moves an existing one aside. Raises UserError
    for whatever the user can mend, before anything is written.
    """
    folder = metrics.check(config, resume=resume, fresh=fresh)
    hosts.agree("the config", config.model_dump(mode="json", exclude={"hosts": {"index"}}))
    say = resuming.speaker(show)
    resume or resuming.vacant(config, folder)
    config = resuming.pin(resuming.settle(config, folder, say) if resume else config)
    mesh = make_mesh(config.mesh)
    check_agents(config, mesh)
    problems, _ = data.problems(config.data)
    steps = config.steps or data.steps_of(len(problems), batch=config.rollout.prompts, epochs=config.epochs)
    with jax.set_mesh(mesh), rewards.open_custom(config.reward) as custom:
        with guard.memory("load"):
            agents = [
                policy.create(config, k, mesh, steps * config.updates_per_step()) for k in range(len(config.agents))
            ]
        exchange.check([agent.tokenizer for agent in agents], config.objective)
        initial = resuming.first_weights(agents)
        held_out = [(settings, data.problems(settings.data)[0]) for settings in config.eval.sets]
        problems, long = readable(problems, agents)
        batches = data.batches(problems, batch=config.rollout.prompts, seed=config.seed)
        mark = resuming.Mark(0, np.zeros((0, len(agents))), batches.get_state(), not config.eval.before, {})
        if resume:
            with checkpoints(config, folder, write=False) as saved:
                mark = resuming.restore(saved, agents, initial, problems, say) or mark
            batches.set_state(mark.data)
        run = metrics.Run.open(
            config, folder, total=steps, resume_step=(mark.step or -1) if resume else None, evaluated=mark.evaluated,
            fresh=fresh, show=show,
        )  # fmt: skip
        store = checkpoints(config, folder)
        watch = guard.Watch(config.guard, folder, store.check, mark.skipped)
        keep = partial(_keep, run, store, agents, lambda mark: resuming.record(config, agents, initial, problems, mark))
        with run, Grader(config.verifier) as grader, watch, store:
            store.set_aside(after=mark.step)
            run.say(f"{len(problems)} problems, {long} with a long prompt left out; steps {mark.step + 1} to {steps}")
            evaluated = partial(_evaluated, agents, held_out, grader, run, watch, steps)
            verdicts = partial(judge, grader=grader, config=config.reward, custom=custom, say=run.say)
            ability = Ability(mark.history)
            try:
                for agent in agents:
                    with watch.phase("generate", agent.name):
                        for program in agent.warm_up(config.eval.sets):
                            run.progress(mark.step, f"{agent.name} compiles {program}")
                            watch.beat()
                mark = evaluated(mark)
                for step in range(mark.step + 1, steps + 1):
                    ability = train_step(next(batches), step, agents, ability, verdicts, config, run, watch)
                    due = _due(config.eval.every, step) or (step == steps and config.eval.after)
                    mark = resuming.Mark(step, ability.history, batches.get_state(), not due, dict(watch.skipped))
                    run.progress(step)
                    watch.turn()
                    mark = evaluated(mark)
                    if _due(config.checkpoint.every, step) or step == steps:
                        keep(mark)
            except guard.Stop as stop:
                keep(mark)
                store.wait()
                saved = f"saved after step {mark.step}" if mark.step else "no step was complete"
                raise guard.Stop(f"{stop}: {saved}; --resume goes on from there") from None
    return Summary(folder, steps)


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


def checkpoints(config: Config, folder: Path, write: bool = True) -> checkpoint.Store:
    return checkpoint.Store(resuming.place(config, folder), config.checkpoint, write=write)


def _evaluated(agents: Sequence[Agent], held_out: evaluate.HeldOut, grader: Grader, run: metrics.Run,
               watch: guard.Watch, steps: int, mark: resuming.Mark) -> resuming.Mark:  # fmt: skip
    """Do the evaluation that is due at a mark; the one after training may allow longer answers."""
    if not mark.evaluated:
        longest = agents[0].config.eval.final_max_response if mark.step == steps else 0
        if longest:
            held_out = [(own.model_copy(update={"max_response": longest}), problems) for own, problems in held_out]
        evaluate.all_agents(agents, held_out, grader, mark.step, run, watch)
    return replace(mark, evaluated=True)


def _keep(run: metrics.Run, store: checkpoint.Store, agents: Sequence[Agent],
          record: Callable[[resuming.Mark], dict[str, Any]], mark: resuming.Mark) -> None:  # fmt: skip
    """Start saving a mark, unless it is saved already."""
    if mark.step > max(store.steps(), default=0):
        run.sync()  # the rows up to this step first
        store.save(mark.step, {agent.name: resuming.saved(agent) for agent in agents}, record(mark))
