"""What a step leaves behind for people: one metrics row per agent, and the rollouts in words."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hacrl_jax import archive, diagnostics, exchange, guard, metrics
from hacrl_jax.agent import Agent
from hacrl_jax.exchange import Crossing, sources
from hacrl_jax.learner import Outcome
from hacrl_jax.tasks import rewards
from hacrl_jax.tasks.verify import Verdict
from hacrl_jax.types import Buffer, Minibatch, Problem, Rollouts


class Page:
    """The page of one step: clocks while it runs, rows once it is done."""

    def __init__(self, step: int, agents: Sequence[Agent], problems: Sequence[Problem], watch: guard.Watch):
        self.step, self.agents, self.problems, self.watch = step, agents, problems, watch
        self.seconds: dict[tuple[str, str | None], float] = defaultdict(float)  # (phase, agent's name)

    def timed(self, phase: str, agent: Agent | None, function: Callable[..., Any], *arguments: Any) -> Any:
        """function(*arguments), its time until the device is done booked on a phase (and an agent, or on all)."""
        start = time.perf_counter()
        with self.watch.phase(phase, agent.name if agent else None):
            result = jax.block_until_ready(function(*arguments))
        self.seconds[phase, agent.name if agent else None] += time.perf_counter() - start
        return result

    def keep(self, run: metrics.Run, buffer: Buffer, reward: np.ndarray, verdicts: Sequence[Verdict]) -> None:
        """Write the step's rollouts as the config says: text for people, tensors for `hacrl replay`."""
        settings = self.agents[0].config.journal
        if settings.text:
            run.rollouts(self.step, self.rollouts(buffer.text, reward, verdicts, buffer.rollouts))
        if settings.tensors and run.writes:
            folder = run.folder / "rollouts"
            archive.write(folder / archive.name(self.step), self.step, self.problems, buffer, reward)
            archive.prune(folder, self.step, settings.keep_tensors)

    def guard(self, agent: Agent, rows: Minibatch, outcomes: Sequence[Outcome]) -> None:
        """Stop the run where too many updates in a row were skipped."""
        indices = exchange.minibatches(agent.config, agent.index)
        flags = [bool(flag) for flag in jax.device_get([outcome.nonfinite for outcome in outcomes])]
        self.watch.finite(agent.name, self.step, flags, lambda m: exchange.take(rows, indices[m]))

    def rollouts(self, text: Sequence[Sequence[str]], reward: np.ndarray, verdicts: Sequence[Verdict],
                 rollouts: Sequence[Rollouts]) -> Iterator[dict[str, Any]]:  # fmt: skip
        """One row per answer: who was asked what, answered what, and what it earned."""
        samples = reward.shape[1] // len(self.problems)
        for k, agent in enumerate(self.agents):
            length, stopped = jax.device_get((rollouts[k].length, rollouts[k].stopped))
            for i, answer in enumerate(text[k]):
                problem = self.problems[i // samples]
                yield {
                    "agent": agent.name, "problem": problem.id, "sample": i % samples,
                    "prompt": problem.messages[-1][1], "response": answer, "gold": problem.gold,
                    "reward": reward[k, i], "verdict": verdicts[k * reward.shape[1] + i].reason,
                    "tokens": length[i], "finish": "stop" if stopped[i] else "length",
                }  # fmt: skip

    def row(self, agent: Agent, buffer: Buffer, capability: np.ndarray, crossings: Sequence[Crossing],
            outcomes: Sequence[Outcome]) -> dict[str, Any]:  # fmt: skip
        """The metrics of one agent's step; docs/metrics.md says what each key means."""
        own = buffer.rollouts[agent.index]
        chosen = sources(len(self.agents), agent.index, agent.config.objective)
        seen = np.asarray(buffer.reward)[list(chosen)]
        length, stopped = jax.device_get((own.length, own.stopped))
        spread = rewards.spread(seen.reshape(len(seen), len(self.problems), -1))
        earned = np.asarray(buffer.reward[agent.index], np.float64)
        scored = earned[~np.isnan(earned)]
        clocks = {f"time/{phase}": value for (phase, name), value in self.seconds.items() if name in (agent.name, None)}
        return {
            "step": self.step, "agent": agent.name,
            "reward": scored.mean() if scored.size else np.nan, "unscorable": earned.size - scored.size,
            "capability": capability[agent.index],
            "response_length": length.mean(), "stop_rate": stopped.mean(), "truncated": int((~stopped).sum()),
            "dropped": sum(crossing.dropped for crossing in crossings),
            "dropped/lossy": sum(crossing.lossy for crossing in crossings),
            "dropped/too_long": sum(crossing.too_long for crossing in crossings),
            **{f"edge/{j}/inflation": crossings[s].inflation for s, j in enumerate(chosen) if j != agent.index},
            "groups_without_signal": (spread <= 1e-6).mean(),
            **_learning(outcomes, agent, len(self.agents)),
            **clocks, "tokens_per_second": length.sum() / self.seconds["generate", agent.name],
        }  # fmt: skip


def _learning(outcomes: Sequence[Outcome], agent: Agent, n: int) -> dict[str, Any]:
    """Means over the step's updates, and the diagnostics of all their sequences together."""
    first = jax.device_get([outcome.replace(diagnostics=None) for outcome in outcomes])
    metrics = {key: np.mean([getattr(o, key) for o in first]) for key in ("loss", "grad_norm", "lr", "entropy")}
    metrics["nonfinite"] = int(sum(outcome.nonfinite for outcome in first))
    everything = jax.tree.map(lambda *leaves: jnp.concatenate(leaves), *[o.diagnostics for o in outcomes])
    return metrics | diagnostics.summary(everything, agent.index, n)
