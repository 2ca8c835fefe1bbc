"""A run of four steps of two small agents, one of them with low-rank updates and a tokenizer of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hacrl_jax import agent as policy
from hacrl_jax import algorithm
from hacrl_jax.agent import Agent
from hacrl_jax.config import Config, resolve

AGENTS = Path(__file__).parent.parent / "hacrl_jax" / "agents"
NAMES = ("qwen", "llama")


@dataclass
class Finished:
    folder: Path
    config: Config
    agents: Sequence[Agent]
    poisoned: tuple[Any, Any]  # the state before and after an update whose batch held a NaN


def config(runs: Path, /, **changes: Any) -> Config:
    """changes are laid over the config; those of `agents` by name."""
    agents: dict[str, dict[str, Any]] = {
        "qwen": {"name": "qwen", "model": str(AGENTS / "tiny-qwen3-b"), "optimizer": {"lr": 1e-3}},
        "llama": {
            "name": "llama", "model": str(AGENTS / "tiny-llama"), "optimizer": {"lr": 1e-3}, "lora": {"rank": 4},
        },
    }  # fmt: skip
    for name, change in changes.pop("agents", {}).items():
        agents[name] = _merged(agents[name], change)
    raw = {
        "name": "small", "runs": str(runs), "steps": 4, "minibatch": 8,
        "agents": list(agents.values()),
        "data": {"source": "arithmetic", "arithmetic": {"digits": 1, "size": 18}},
        "rollout": {"prompts": 8, "samples": 4, "max_prompt": 40, "max_response": 40, "shrink": 0},
        "objective": {"eps_low": 0.02, "eps_high": 0.02, "delta": 0.5},
        "eval": {"before": False, "after": False},
        "verifier": {"workers": 1},
        "checkpoint": {"every": 1, "keep_last": 4},
        "mesh": {"fsdp": 2},  # two of the eight: on few cores the others only cost
    }  # fmt: skip
    return resolve(_merged(raw, changes))


def finish(runs: Path) -> Finished:
    """Run it. The first update of qwen in step 3 gets a NaN in its batch."""
    here = config(runs)
    agents, states, calls = [], [], []
    create, update = policy.create, Agent.update

    def made(*arguments: Any) -> Agent:
        agents.append(create(*arguments))
        return agents[-1]

    def poison(agent: Agent, part: Any, m: int) -> Any:
        calls.append((agent.name, m))
        if agent.name != "qwen" or calls.count(("qwen", 0)) != 3 or m != 0:
            return update(agent, part, m)
        states.append(jax.tree.map(np.array, agent.state))
        outcome = update(agent, part.replace(advantage=part.advantage * jnp.nan), m)
        states.append(jax.tree.map(np.array, agent.state))
        return outcome

    policy.create, Agent.update = made, poison
    try:
        summary = algorithm.train(here, show=False)
    finally:
        policy.create, Agent.update = create, update
    return Finished(summary.folder, here, agents, (states[0], states[1]))


def _merged(low: dict[str, Any], high: dict[str, Any]) -> dict[str, Any]:
    merged = dict(low)
    for key, value in high.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _merged(merged[key], value) if both else value
    return merged
