"""What is around Algorithm 1: how a run starts or goes on, and what is due between two of its steps."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hacrl_jax import agent as policy
from hacrl_jax import checkpoint, evaluate, exchange, guard, hosts, metrics, resuming, tokenizer
from hacrl_jax.agent import Agent
from hacrl_jax.config import Config
from hacrl_jax.sharding import check_agents, make_mesh
from hacrl_jax.tasks import data, rewards
from hacrl_jax.tasks.grader import Grader
from hacrl_jax.types import Problem, UserError


@dataclass
class Frame:
    """An open run. Only mark changes: the last point between two steps, which is what a signal saves."""

    config: Config
    agents: Sequence[Agent]
    total: int  # steps of the whole run
    problems: Sequence[Problem]
    batches: Any  # iterator with get_state: lists of rollout.prompts problems
    held_out: evaluate.HeldOut
    initial: dict[str, str]  # by agent, fingerprint of its first weights
    grader: Grader
    custom: Sequence[rewards.CustomReward]
    output: metrics.Run
    watch: guard.Watch
    store: checkpoint.Store
    mark: resuming.Mark

    def steps(self) -> Iterator[tuple[int, list[Problem]]]:
        """The steps that are left, each with its problems; ``done`` must end each."""
        for step in range(self.mark.step + 1, self.total + 1):
            yield step, next(self.batches)

    def done(self, step: int, history: np.ndarray) -> None:
        """The end of a step: stop here if a signal came, evaluate and save what is due. history: capability window."""
        due = _due(self.config.eval.every, step) or (step == self.total and self.config.eval.after)
        self.mark = resuming.Mark(step, history, self.batches.get_state(), not due, dict(self.watch.skipped))
        self.output.progress(step)
        self.watch.turn()
        self.evaluate()
        if _due(self.config.checkpoint.every, step) or step == self.total:
            self.save()

    def warm_up(self) -> None:
        """Compile what the samplers need."""
        for agent in self.agents:
            with self.watch.phase("generate", agent.name):
                for program in agent.warm_up(self.config.eval.sets):
                    self.output.progress(self.mark.step, f"{agent.name} compiles {program}")
                    self.watch.beat()

    def evaluate(self) -> None:
        """Do the evaluation that is due at the mark; the one after training may allow longer answers."""
        if not self.mark.evaluated:
            held_out, longest = self.held_out, self.config.eval.final_max_response
            if longest and self.mark.step == self.total:
                held_out = [(own.model_copy(update={"max_response": longest}), problems) for own, problems in held_out]
            evaluate.all_agents(self.agents, held_out, self.grader, self.mark.step, self.output, self.watch)
            self.mark = replace(self.mark, evaluated=True)

    def save(self) -> None:
        """Start saving the mark, unless it is saved already."""
        if self.mark.step > max(self.store.steps(), default=0):
            self.output.sync()  # the rows up to this step first
            record = resuming.record(self.config, self.agents, self.initial, self.problems, self.mark)
            self.store.save(self.mark.step, {agent.name: resuming.saved(agent) for agent in self.agents}, record)


@contextmanager
def opened(config: Config, *, resume: bool, fresh: bool, show: bool) -> Iterator[Frame]:
    """A run, at its start or its last complete checkpoint, ready for its next step.

    Raises UserError for whatever the user can mend, before anything is written. A signal inside ends it: the mark is
    saved, and guard.Stop says so.
    """
    folder = metrics.check(config, resume=resume, fresh=fresh)
    hosts.agree("the config", config.model_dump(mode="json", exclude={"hosts": {"index"}}))
    say = resuming.speaker(show)
    resume or resuming.vacant(config, folder)
    config = resuming.pin(resuming.settle(config, folder, say) if resume else config)
    mesh = make_mesh(config.mesh)
    check_agents(config, mesh)
    problems, _ = data.problems(config.data)
    total = config.steps or data.steps_of(len(problems), batch=config.rollout.prompts, epochs=config.epochs)
    with jax.set_mesh(mesh), rewards.open_custom(config.reward) as custom:
        for function in custom if jax.process_index() == 0 else ():  # the host that will call them
            function.start()
        with guard.memory("load"):
            updates = total * config.updates_per_step()
            agents = [policy.create(config, k, mesh, updates) for k in range(len(config.agents))]
        exchange.check([agent.tokenizer for agent in agents], config.objective)
        initial = resuming.first_weights(agents)
        held_out = [(settings, data.problems(settings.data)[0]) for settings in config.eval.sets]
        check_held_out(held_out, agents)
        problems, long = readable(problems, agents)
        batches = data.batches(problems, batch=config.rollout.prompts, seed=config.seed)
        mark = resuming.Mark(0, np.zeros((0, len(agents))), batches.get_state(), not config.eval.before, {})
        if resume:
            with checkpoints(config, folder, write=False) as saved:
                mark = resuming.restore(saved, agents, initial, problems, say) or mark
            batches.set_state(mark.data)
        output = metrics.Run.open(
            config, folder, total=total, resume_step=(mark.step or -1) if resume else None, evaluated=mark.evaluated,
            fresh=fresh, show=show,
        )  # fmt: skip
        store = checkpoints(config, folder)
        watch = guard.Watch(config.guard, folder, store.check, mark.skipped)
        with output, Grader(config.verifier) as grader, watch, store:
            store.set_aside(after=mark.step)
            left = f"steps {mark.step + 1} to {total}"
            output.say(f"{len(problems)} problems, {long} with a long prompt left out; {left}")
            frame = Frame(
                config, agents, total, problems, batches, held_out, initial, grader, custom, output, watch, store, mark
            )  # fmt: skip
            try:
                frame.warm_up()
                frame.evaluate()
                yield frame
            except guard.Stop as stop:
                frame.save()
                store.wait()
                told = f"saved after step {frame.mark.step}" if frame.mark.step else "no step was complete"
                raise guard.Stop(f"{stop}: {told}; --resume goes on from there") from None


def readable(problems: Sequence[Problem], agents: Sequence[Agent]) -> tuple[list[Problem], int]:
    """The problems whose prompt every agent can read, and how many were left out: for all agents together."""
    limit = agents[0].config.rollout.max_prompt
    kept = [problem for problem in problems if all(_length(agent, problem) <= limit for agent in agents)]
    if not kept:
        raise UserError(f"data: every prompt is longer than rollout.max_prompt {limit}; raise it")
    return kept, len(problems) - len(kept)


def check_held_out(held_out: evaluate.HeldOut, agents: Sequence[Agent]) -> None:
    """Raise UserError for an evaluation prompt that an agent cannot read: none is left out of a measure."""
    limit = agents[0].config.rollout.max_prompt
    for settings, problems in held_out:
        for agent in agents:
            lengths = [_length(agent, problem) for problem in problems]
            if long := sum(length > limit for length in lengths):
                raise UserError(
                    f"eval.sets {evaluate.name(settings)}: {long} of {len(problems)} prompts are longer than "
                    f"rollout.max_prompt {limit} for agent {agent.name}; set it to {max(lengths)} or more"
                )


def checkpoints(config: Config, folder: Path, write: bool = True) -> checkpoint.Store:
    return checkpoint.Store(resuming.place(config, folder), config.checkpoint, write=write)


def _length(agent: Agent, problem: Problem) -> int:
    return len(tokenizer.render(agent.tokenizer, problem))


def _due(every: int, step: int) -> bool:
    return bool(every) and step % every == 0
