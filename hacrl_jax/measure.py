"""Evaluation of agents on held-out problems: generate, grade, estimate, log."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from hacrl_jax import metrics
from hacrl_jax.agent import Agent
from hacrl_jax.config import EvalSet
from hacrl_jax.tasks.grader import Grader
from hacrl_jax.types import Problem


def all_agents(agents: Sequence[Agent], held_out: Sequence[tuple[EvalSet, Sequence[Problem]]], grader: Grader,
               step: int, run: metrics.Run) -> None:  # fmt: skip
    """Evaluate every agent on every set; one metrics row each."""
    for agent in agents:
        row: dict[str, Any] = {"step": step, "agent": agent.name}
        for settings, problems in held_out:
            name = settings.data.name or settings.data.source
            run.progress(step, f"{agent.name} on {name}")
            answers = list(answer(agent, problems, settings, grader, step))
            correct = np.asarray([[item["reward"] for item in group] for group in answers])  # [problems, k]
            row[f"eval/{name}/avg@{settings.samples}"] = correct.mean()
            row[f"eval/{name}/problems"] = len(correct)
            row[f"eval/{name}/stop_rate"] = np.mean([item["finish"] == "stop" for group in answers for item in group])
        run.log(row)


def answer(agent: Agent, problems: Sequence[Problem], settings: EvalSet, grader: Grader,
           step: int) -> Iterator[list[dict[str, Any]]]:  # fmt: skip
    """The graded answers of one agent, problem by problem, k each."""
    size, k = agent.config.rollout.prompts, settings.samples
    for start in range(0, len(problems), size):
        chunk = list(problems[start : start + size])
        full = chunk + [chunk[-1]] * (size - len(chunk))  # one shape for the sampler, the last chunk included
        rollouts = agent.answer(full, settings, step, k)
        text = agent.text(rollouts)[: len(chunk) * k]
        verdicts = grader.grade([problem.gold for problem in chunk for _ in range(k)], list(text))
        length, stopped = np.asarray(rollouts.length), np.asarray(rollouts.stopped)
        for b, problem in enumerate(chunk):
            yield [
                {
                    "problem": problem.id, "prompt": problem.messages[-1][1], "gold": problem.gold, "response": text[i],
                    "reward": float(verdicts[i].correct), "verdict": verdicts[i].reason, "tokens": int(length[i]),
                    "finish": "stop" if stopped[i] else "length", "agent": agent.name, "sample": i - b * k,
                }
                for i in range(b * k, (b + 1) * k)
            ]  # fmt: skip
