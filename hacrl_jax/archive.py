"""A step's shared buffer on disk, as safetensors: all that an update depends on besides the policies themselves.

`rollouts/step_000012.safetensors` holds, for every agent, sampled ids, the log-probs of sampler and trainer, and
rewards, without padding; its header the problems. `hacrl replay` rebuilds updates from it, bit by bit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from hacrl_jax.types import Buffer, Problem, Rollouts, UserError

FORMAT = 1


def write(path: Path, step: int, problems: Sequence[Problem], buffer: Buffer, reward: np.ndarray) -> None:
    """Replace the file of a step as a whole or not at all, durably. reward [n, N] float64, as it was judged."""
    arrays = {"reward": np.asarray(reward, np.float64)}
    for k, (own, score) in enumerate(zip(buffer.rollouts, buffer.score, strict=True)):
        own, score = jax.device_get((own, score))
        inside = np.arange(own.response.shape[1]) < own.length[:, None]
        arrays |= {
            f"{k}.prompt": own.prompt, f"{k}.prompt_length": own.prompt_length, f"{k}.length": own.length,
            f"{k}.stopped": own.stopped, f"{k}.response": own.response[inside], f"{k}.logprob": own.logprob[inside],
            f"{k}.score": score[inside],
        }  # fmt: skip
    facts = {
        "step": step, "agents": len(buffer.rollouts), "responses": buffer.rollouts[0].response.shape[1],
        "problems": [dataclasses.asdict(problem) for problem in problems],
    }  # fmt: skip
    write_arrays(path, arrays, facts)


def read(path: Path) -> tuple[list[Problem], Buffer, np.ndarray]:
    """The inverse of ``write``; texts are empty. Raises UserError for a file that is missing or broken."""
    arrays, facts = read_arrays(path)
    rollouts, scores = [], []
    for k in range(facts["agents"]):
        part = {key.partition(".")[2]: x for key, x in arrays.items() if key.startswith(f"{k}.")}
        inside = np.arange(facts["responses"]) < part["length"][:, None]
        wide = {key: _spread(part[key], inside) for key in ("response", "logprob", "score")}
        scores.append(jnp.asarray(wide["score"]))
        rollouts.append(Rollouts(
            *(jnp.asarray(x) for x in (
                part["prompt"], part["prompt_length"], wide["response"], part["length"], wide["logprob"],
                part["stopped"],
            ))
        ))  # fmt: skip
    problems = [
        Problem(item["id"], tuple((role, text) for role, text in item["messages"]), item["gold"], item["source"])
        for item in facts["problems"]
    ]
    reward = jnp.asarray(arrays["reward"], jnp.float32)
    return problems, Buffer(tuple(rollouts), tuple(scores), reward, tuple(() for _ in rollouts)), arrays["reward"]


def name(step: int) -> str:
    return f"step_{step:06d}.safetensors"


def prune(folder: Path, step: int, keep: int) -> None:
    """Remove all but the files of the last `keep` steps up to `step`; 0 keeps all."""
    for file in folder.glob("step_*.safetensors") if keep else ():
        found = re.fullmatch(r"step_(\d+)\.safetensors", file.name)
        if found and int(found[1]) <= step - keep:
            file.unlink(missing_ok=True)


def write_arrays(path: Path, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """One safetensors file with a JSON record in its header, whole or not at all, durable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    host = {key: np.ascontiguousarray(x) for key, x in arrays.items()}
    # One entry: safetensors writes several in an order that changes from run to run.
    content = save(host, metadata={"facts": json.dumps({"format": FORMAT, **facts}, ensure_ascii=False)})
    with temporary.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_arrays(path: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    if not path.is_file():
        raise UserError(f"{path} does not exist; journal.tensors writes it, journal.keep_tensors says for how long")
    try:
        with safe_open(path, framework="numpy") as file:
            facts = json.loads((file.metadata() or {})["facts"])
            return {key: file.get_tensor(key) for key in file.keys()}, facts  # noqa: SIM118
    except (SafetensorError, KeyError, ValueError) as error:
        raise UserError(f"{path} is damaged: {' '.join(str(error).split())}") from None


def _spread(flat: np.ndarray, inside: np.ndarray) -> np.ndarray:
    wide = np.zeros(inside.shape, flat.dtype)
    wide[inside] = flat
    return wide
