"""Checkpoints by orbax: all agents of a run in one step, complete only when every part is durable.

A step holds one flat dict of arrays (names such as ``qwen/trainable/layers/q_proj/kernel``) and one JSON record: step,
seed, capability window, data iterator, fingerprints of the initial weights. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp

from hacrl_jax.config import CheckpointConfig
from hacrl_jax.types import Array, UserError


@dataclass(frozen=True)
class Restored:
    step: int
    arrays: Any  # the same tree that was asked for
    record: dict[str, Any]


class Store:
    """The checkpoints of one run folder. Saves are asynchronous; an error of one surfaces at the next call."""

    def __init__(self, folder: Path | str, config: CheckpointConfig):
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep_last, keep_period=config.keep_every or None, enable_async_checkpointing=True,
            create=False, step_prefix="step", cleanup_tmp_directories=True,
        )  # fmt: skip
        path = str(folder)
        if "://" not in path:
            Path(path).mkdir(parents=True, exist_ok=True)
            path = str(Path(path).absolute())
        self.folder = path
        self._manager = ocp.CheckpointManager(path, options=options)

    def save(self, step: int, arrays: Any, record: Mapping[str, Any]) -> None:
        """Start saving; arrays are copied before this returns, so the caller may donate them."""
        self._manager.save(
            step,
            args=ocp.args.Composite(
                arrays=ocp.args.StandardSave(flatten(arrays)), record=ocp.args.JsonSave({"step": step, **record})
            ),
        )

    def steps(self) -> list[int]:
        """Complete steps, oldest first."""
        return sorted(self._manager.all_steps())

    def restore(self, like: Any, say: Any = print) -> Restored | None:
        """The newest step that opens whole, as a tree like `like` (shardings included); None when there is none.

        A damaged step is skipped with a line. Names that are missing or that nothing asks for are an error: a fresh
        optimizer is never made up.
        """
        flat = flatten(like)
        abstract = {name: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding) for name, x in flat.items()}
        for step in reversed(self.steps()):
            try:
                record = self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
                saved = self._manager.item_metadata(step).arrays
                names = set(saved) if saved is not None else set()
            except Exception as error:
                say(f"checkpoint of step {step} is damaged and skipped: {_line(error)}")
                continue
            if names and names != set(abstract):
                raise UserError(
                    f"checkpoint of step {step} in {self.folder} does not fit this run: missing "
                    f"{sorted(set(abstract) - names)[:3]}, unknown {sorted(names - set(abstract))[:3]}"
                )
            try:
                arrays = self._manager.restore(
                    step, args=ocp.args.Composite(arrays=ocp.args.StandardRestore(abstract))
                ).arrays
            except Exception as error:
                say(f"checkpoint of step {step} is damaged and skipped: {_line(error)}")
                continue
            return Restored(step, unflatten(like, arrays), json.loads(json.dumps(record)))
        return None

    def wait(self) -> None:
        """Until the last save is durable. Raises what it raised."""
        self._manager.wait_until_finished()
        self._manager.check_for_errors()

    def close(self) -> None:
        self._manager.close()


def flatten(tree: Any) -> dict[str, Array]:
    """A tree of arrays as one flat dict with readable names; Nones have no entry."""
    return {name: leaf for name, leaf in _named(tree)}


def unflatten(like: Any, flat: Mapping[str, Array]) -> Any:
    """The inverse of flatten for a tree of the same shape as `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name, _ in _named(like)])


def fingerprint(params: Any) -> str:
    """A short fingerprint of a tree of arrays, computed where the arrays live: equal weights, equal fingerprint."""
    parts = [int(x) for x in jax.device_get(_sums(jax.tree.leaves(params)))]
    total = 0
    for part in parts:
        total = (total * 1_000_003 + part) % (1 << 64)
    return f"{total:016x}"


@jax.jit
def _sums(leaves: list[Array]) -> Array:
    def one(x: Array) -> Array:
        bits = jax.lax.bitcast_convert_type(x, jnp.uint32 if x.dtype.itemsize == 4 else jnp.uint16).astype(jnp.uint32)
        flat = bits.reshape(-1)
        # Odd weights by position, so that two swapped values do not cancel; uint32 wraps around.
        return jnp.sum(flat * (2 * jnp.arange(flat.shape[0], dtype=jnp.uint32) + 1), dtype=jnp.uint32)

    return jnp.stack([one(x) for x in leaves])


def _named(tree: Any) -> Iterator[tuple[str, Array]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield "/".join(_part(key) for key in path), leaf


def _part(key: Any) -> str:
    for field in ("key", "name", "idx"):
        if hasattr(key, field):
            return str(getattr(key, field))
    return str(key)


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
