"""What a checkpoint holds of a run, and what must still be as it was for the run to go on from it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np

from hacrl_jax import checkpoint, models, tokenizer
from hacrl_jax.agent import Agent
from hacrl_jax.config import Config
from hacrl_jax.models import hf
from hacrl_jax.tasks import data
from hacrl_jax.types import Problem, UserError

# Keys whose change cannot change what the agents learn. Model and data are told by their fingerprints instead.
FREE = (
    "name", "runs", "preset", "eval", "checkpoint", "journal", "guard", "hosts", "verifier.workers",
    "verifier.deadline", "verifier.memory_mb", "verifier.max_error_share", "agents.*.model", "agents.*.revision",
    "agents.*.offload", "data",
)  # fmt: skip
# Keys that change the order of additions: the same run up to the last bits.
ROUNDING = (
    "mesh", "agents.*.mesh", "rollout.slots", "rollout.shrink", "rollout.dispatch_steps", "agents.*.micro_batch",
    "agents.*.packing", "agents.*.logprob_chunk", "agents.*.remat", "agents.*.attention",
)  # fmt: skip
LENGTH = ("steps", "epochs")  # free with a constant learning rate: a run may be made longer


@dataclass(frozen=True)
class Mark:
    """A point between two steps at which a run can stop and go on, besides the agents themselves.

    history: the capability window, [at most K, n]. data: state of the iterator. evaluated: whether the evaluation due
    after this step is done. skipped: by agent, updates in a row without a finite loss.
    """

    step: int
    history: np.ndarray
    data: Mapping[str, Any]
    evaluated: bool
    skipped: Mapping[str, int]


def place(config: Config, folder: Path) -> str:
    """Where a run's checkpoints are: its own folder, or NAME under checkpoint.folder."""
    chosen = config.checkpoint.folder
    return f"{chosen.rstrip('/')}/{folder.name}" if chosen else str(folder / "checkpoints")


def pin(config: Config) -> Config:
    """The config with the commit of every hub model as its revision: what a resumed run must load again."""
    agents = []
    for agent in config.agents:
        commit = hf.commit(models.resolve(agent.model, agent.revision))
        agents.append(agent.model_copy(update={"revision": commit}) if commit else agent)
    return config.model_copy(update={"agents": tuple(agents)})


def vacant(config: Config, folder: Path) -> None:
    """Raise UserError where a new run would find checkpoints of another; a run folder itself is looked at elsewhere."""
    if config.checkpoint.folder:
        with checkpoint.Store(place(config, folder), config.checkpoint, write=False) as store:
            if store.steps():
                raise UserError(f"{store.folder} holds checkpoints; --resume continues them, name=OTHER starts another")


def settle(config: Config, folder: Path, say: checkpoint.Say) -> Config:
    """The config to continue with: hub revisions that it leaves open are those of the run.

    Raises UserError that lists what differs from the run's config and matters; says what differs and may change the
    last bits. Reads one record, no model.
    """
    with checkpoint.Store(place(config, folder), config.checkpoint, write=False) as store:
        record = next((record for step in reversed(store.steps()) if (record := store.record(step))), None)
    if record is None:
        return config
    saved, now = record["config"], config.model_dump(mode="json")
    matters, rounding = differences(saved, now)
    if matters:
        raise UserError(
            f"--resume: the config differs from the run's in {folder}: {'; '.join(matters)}; "
            "set them back, or start another run with name=OTHER"
        )
    if changed := rounding + _machine_changes(record["machine"], machine()):
        say(f"results may differ in the last bits from an unbroken run: {'; '.join(changed)}")
    known = {agent["name"]: agent for agent in saved["agents"]}
    agents = [
        agent.model_copy(update={"revision": known[agent.name]["revision"]})
        if agent.revision is None and agent.model == known[agent.name]["model"] else agent
        for agent in config.agents
    ]  # fmt: skip
    return config.model_copy(update={"agents": tuple(agents)})


def differences(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """(what matters, what may change the last bits) between two dumped configs, as `key: was X, is Y`."""
    constant = all(agent["optimizer"]["schedule"] == "constant" for agent in [*saved["agents"], *now["agents"]])
    free = FREE + (LENGTH if constant else ())
    matters, rounding = [], []
    for key, was, is_ in _compare(_by_name(saved), _by_name(now), ""):
        if _matches(key, free):
            continue
        (rounding if _matches(key, ROUNDING) else matters).append(f"{key}: was {_short(was)}, is {_short(is_)}")
    return matters, rounding


def record(config: Config, agents: Sequence[Agent], initial: Mapping[str, str], problems: Sequence[Problem],
           mark: Mark) -> dict[str, Any]:  # fmt: skip
    """The JSON record of a checkpoint. initial: fingerprints of the agents' first weights."""
    return {
        "config": config.model_dump(mode="json"), "seed": config.seed, "ability": mark.history.tolist(),
        "data": dict(mark.data), "evaluated": mark.evaluated, "skipped": dict(mark.skipped),
        "problems": data.fingerprint(problems), "machine": machine(),
        "initial": {agent.name: initial[agent.name] for agent in agents},
        "prompts": {agent.name: reading(agent, problems) for agent in agents},
    }  # fmt: skip


def restore(store: checkpoint.Store, agents: Sequence[Agent], initial: Mapping[str, str], problems: Sequence[Problem],
            say: checkpoint.Say) -> Mark | None:  # fmt: skip
    """Set the agents to the newest whole checkpoint; None where there is none yet.

    Raises UserError where the data, a model's first weights or its way to read a prompt are not the run's.
    """
    restored = load(store, agents, initial, say)
    if restored is None:
        say(f"no checkpoint in {store.folder} yet: starting at step 1")
        return None
    say(f"resuming after step {restored.step}, the last complete checkpoint in {store.folder}")
    found = restored.record
    if found["problems"] != data.fingerprint(problems):
        raise UserError("--resume: the training data differ from the run's: other problems, or in another order")
    for agent in agents:
        if found["prompts"][agent.name] != reading(agent, problems):
            raise UserError(f"--resume: agent {agent.name} reads prompts otherwise: its tokenizer or template differs")
    return Mark(
        restored.step, np.asarray(found["ability"], np.float64).reshape(-1, len(found["config"]["agents"])),
        found["data"], found["evaluated"], found["skipped"],
    )  # fmt: skip


def load(store: checkpoint.Store, agents: Sequence[Agent], initial: Mapping[str, str] | None, say: checkpoint.Say, *,
         last: int | None = None) -> checkpoint.Restored | None:  # fmt: skip
    """Set the agents to the newest whole checkpoint (not after step `last`); None where there is none.

    initial: fingerprints of the weights that the agents were made with, compared with the run's; None takes any.
    """
    restored = store.restore({agent.name: saved(agent) for agent in agents}, say, last=last)
    if restored is None:
        return None
    for agent in agents:
        if initial is not None and restored.record["initial"][agent.name] != initial[agent.name]:
            raise UserError(
                f"agent {agent.name}: {agent.folder} holds other weights than those the run started from; "
                "the reference policy and the export would be wrong"
            )
        agent.state = restored.agents[agent.name].replace(frozen=agent.state.frozen)
        agent.sync()
    return restored


def saved(agent: Agent) -> Any:
    """The part of an agent's state that training changes: frozen weights are the model's own."""
    return agent.state.replace(frozen=None)


def first_weights(agents: Sequence[Agent]) -> dict[str, str]:
    """Fingerprints of the weights that agents start from; to be taken before any update or restore."""
    return {agent.name: checkpoint.fingerprint(agent.params) for agent in agents}


def reading(agent: Agent, problems: Sequence[Problem]) -> str:
    """A hash of how an agent renders the first problem: its ids, hence tokenizer, template and prompt settings."""
    ids = tokenizer.render(agent.tokenizer, problems[0])
    return hashlib.sha256(repr((agent.tokenizer.fingerprint, ids)).encode()).hexdigest()[:16]


def machine() -> dict[str, Any]:
    """What the last bits of a result depend on besides the config."""
    return {
        "devices": jax.device_count(), "kind": jax.devices()[0].device_kind, "processes": jax.process_count(),
        "cpus": os.cpu_count(), "XLA_FLAGS": os.environ.get("XLA_FLAGS", ""),
        "jax": importlib.metadata.version("jax"), "jaxlib": importlib.metadata.version("jaxlib"),
    }  # fmt: skip


def _machine_changes(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [f"{key} was {_short(was.get(key))}, is {_short(now[key])}" for key in now if was.get(key) != now[key]]


def _by_name(config: Mapping[str, Any]) -> dict[str, Any]:
    return {**config, "agents": {agent["name"]: agent for agent in config["agents"]}}


def _compare(was: Any, is_: Any, key: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(was, Mapping) and isinstance(is_, Mapping):
        for part in [*was, *(part for part in is_ if part not in was)]:
            yield from _compare(was.get(part), is_.get(part), f"{key}.{part}" if key else part)
    elif was != is_:
        yield key, was, is_


def _matches(key: str, patterns: Sequence[str]) -> bool:
    shapes = (re.escape(pattern).replace(r"\*", r"[^.]+") for pattern in patterns)
    return any(re.fullmatch(rf"{shape}(\..*)?", key) for shape in shapes)


def _short(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "..."


def speaker(show: bool) -> Callable[[str], None]:
    """Says lines on stderr, from the first host."""

    def say(line: str) -> None:
        if show and jax.process_index() == 0:
            os.write(2, (line + "\n").encode())

    return say
