"""Evaluation of agents on held-out problems: generate, grade, estimate, log."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hacrl_jax import checkpoint, guard, hosts, metrics, resuming
from hacrl_jax.agent import Agent, create
from hacrl_jax.config import Config, EvalSet
from hacrl_jax.sharding import make_mesh
from hacrl_jax.tasks import data
from hacrl_jax.tasks.grader import Grader
from hacrl_jax.tasks.verify import Verdict
from hacrl_jax.types import Problem, UserError

Graded = tuple[dict[str, Any], list[list[dict[str, Any]]]]  # a metrics row, and the answers behind it
HeldOut = Sequence[tuple[EvalSet, Sequence[Problem]]]


def all_agents(agents: Sequence[Agent], held_out: HeldOut, grader: Grader, step: int, run: metrics.Run,
               watch: guard.Watch) -> None:  # fmt: skip
    """Evaluate every agent on every set; one metrics row each, all or none of them."""
    rows = []
    for agent in agents:
        row: dict[str, Any] = {"step": step, "agent": agent.name}
        for settings, problems in held_out:
            run.progress(step, f"{agent.name} on {name(settings)}")
            with watch.phase("evaluate", agent.name):
                answers = []
                for group in answer(agent, problems, settings, grader, step):
                    answers.append(group)
                    watch.beat()
            row |= summary(settings, answers)
        rows.append(row)
    for row in rows:
        run.log(row)


def evaluate(config: Config, checkpoints: str | None, say: Callable[[str], None]) -> Iterator[Graded]:
    """Evaluate a config's agents as they were downloaded, or as a run's newest checkpoint has them.

    Yields (metrics row, graded answers, k for each problem) for every agent and set. Raises UserError where the config
    names no set or the run has no checkpoint.
    """
    if not config.eval.sets:
        raise UserError("eval.sets is empty; add one, for example 'eval.sets=[{data: {source: test.jsonl}}]'")
    mesh = make_mesh(config.mesh)
    held_out = [(settings, data.problems(settings.data)[0]) for settings in config.eval.sets]
    with jax.set_mesh(mesh), Grader(config.verifier) as grader:
        agents = [create(config, k, mesh, config.updates_per_step()) for k in range(len(config.agents))]
        step = 0 if checkpoints is None else _restore(agents, checkpoints, config, say)
        for agent in agents:
            for settings, problems in held_out:
                say(f"{agent.name} on {name(settings)}: {len(problems)} problems, {settings.samples} answers each")
                answers = list(answer(agent, problems, settings, grader, step))
                yield {"step": step, "agent": agent.name, **summary(settings, answers)}, answers


def _restore(agents: Sequence[Agent], checkpoints: str, config: Config, say: Callable[[str], None]) -> int:
    with checkpoint.Store(checkpoints, config.checkpoint, write=False) as store:
        restored = resuming.load(store, agents, resuming.first_weights(agents), say)
    if restored is None:
        raise UserError(f"{checkpoints} holds no complete checkpoint")
    return restored.step


def name(settings: EvalSet) -> str:
    """How metrics call a set."""
    return settings.data.name or Path(settings.data.source).stem


def summary(settings: EvalSet, answers: Sequence[Sequence[dict[str, Any]]]) -> dict[str, float]:
    """The metrics of one set from its graded answers, k for each problem; the error is over problems."""
    correct = np.asarray([[item["reward"] for item in group] for group in answers]).mean(axis=1)  # [problems]
    key = f"eval/{name(settings)}"
    error = correct.std(ddof=1) / np.sqrt(len(correct)) if len(correct) > 1 else 0.0
    return {
        f"{key}/avg@{settings.samples}": correct.mean(),
        f"{key}/avg@{settings.samples}/stderr": error,
        f"{key}/problems": len(correct),
        f"{key}/stop_rate": np.mean([item["finish"] == "stop" for group in answers for item in group]),
    }


def answer(agent: Agent, problems: Sequence[Problem], settings: EvalSet, grader: Grader,
           step: int) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
    """The graded answers of one agent, problem by problem, k each."""
    size, k = agent.config.rollout.prompts, settings.samples
    for start in range(0, len(problems), size):
        chunk = list(problems[start : start + size])
        full = chunk + [chunk[-1]] * (size - len(chunk))  # one shape for the sampler, the last chunk included
        rollouts = agent.answer(full, settings, step, k)
        text = agent.text(rollouts)[: len(chunk) * k]
        golds = [problem.gold for problem in chunk for _ in range(k)]
        verdicts = hosts.spread(Verdict, grader.grade, golds, list(text))
        length, stopped = np.asarray(rollouts.length), np.asarray(rollouts.stopped)
        for b, problem in enumerate(chunk):
            yield [
                {
                    "problem": problem.id, "prompt": problem.messages[-1][1], "gold": problem.gold, "response": text[i],
                    "reward": float(verdicts[i].correct), "verdict": verdicts[i].reason, "tokens": int(length[i]),
                    "finish": "stop" if stopped[i] else "length", "agent": agent.name, "sample": i - b * k,
                    "set": name(settings), "step": step,
                }
                for i in range(b * k, (b + 1) * k)
            ]  # fmt: skip
