"""Checkpoints by orbax: all agents of a run in one step, complete only when every part is durable.

A step holds, for each agent, one flat dict of arrays (names such as ``trainable/layers/q_proj/kernel``), and one JSON
record. The record lists every array and a fingerprint of each agent's arrays, so that a step with a part missing,
truncated or altered is found out when it is opened. Nothing is pickled.
"""

from __future__ import annotations

import logging
import re
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from urllib.parse import quote

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import tensorstore
from etils import epath
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from hacrl_jax.config import CheckpointConfig
from hacrl_jax.mirror import Mirror
from hacrl_jax.types import Array, UserError

Say = Callable[[str], Any]
NATIVE = ("gs://", "s3://")  # what orbax writes to by itself; other URLs get copies
DAMAGED = "damaged."  # what the name of a set-aside step starts with


@dataclass(frozen=True)
class Restored:
    step: int
    agents: dict[str, Any]  # the trees that were asked for, by agent
    record: dict[str, Any]


class Store:
    """The checkpoints of one run. Saves are asynchronous: ``check`` tells of one that failed.

    write False opens them for reading only, and leaves a save that another process is at alone.
    """

    def __init__(self, folder: Path | str, config: CheckpointConfig, *, write: bool = True):
        self.folder = str(folder) if "://" in str(folder) else str(Path(folder).absolute())
        self._config = config
        self._task: Future[None] | None = None  # the save that goes on
        self._failed: UserError | None = None
        self._manager, self._mirror, self._staging = None, None, None
        self._local = self.folder  # where orbax reads and writes
        if "://" in self.folder and not self.folder.startswith(NATIVE):
            if jax.process_count() > 1:
                raise UserError(f"checkpoint.folder {self.folder}: several hosts need a shared folder, gs:// or s3://")
            self._mirror, self._staging = Mirror(self.folder), TemporaryDirectory(prefix="checkpoints-")
            self._local = self._staging.name
        elif not write and not epath.Path(self.folder).is_dir():
            return
        for name in ("absl", "asyncio"):
            logging.getLogger(name).addFilter(_without_chatter)
        if sys.unraisablehook is sys.__unraisablehook__:
            sys.unraisablehook = _without_late_writes
        options = ocp.CheckpointManagerOptions(
            max_to_keep=config.keep_last, keep_period=config.keep_every or None, step_prefix="step", create=write,
            cleanup_tmp_directories=write, read_only=not write, lightweight_initialize=True, save_root_metadata=False,
            async_options=ocp.AsyncOptions(barrier_sync_fn=_meet),
        )  # fmt: skip
        self._manager = ocp.CheckpointManager(self._local, options=options)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        try:
            self.close()
        except UserError:
            if kind is None:  # otherwise the first error is the one to tell
                raise

    def save(self, step: int, agents: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        """Start saving a step later than all before; the arrays are copied before this returns.

        Waits for the save before it. Raises what ``check`` raises.
        """
        self.wait()
        flat = {name: flatten(tree) for name, tree in agents.items()}
        arrays = {
            name: {"fingerprint": fingerprint(part), "arrays": {key: _shape(x) for key, x in part.items()}}
            for name, part in flat.items()
        }
        items = {_item(name): ocp.args.StandardSave(part) for name, part in flat.items()}
        items["record"] = ocp.args.JsonSave({**record, "step": step, "agents": arrays})
        self._saving = step
        with self._telling():
            assert self._manager.save(step, args=ocp.args.Composite(**items), force=True)
            self._task = self._worker.submit(self._finish, step)

    def check(self) -> None:
        """Raise UserError if a save failed in the background; costs nothing and never waits for one that goes on."""
        if self._failed or (self._task and self._task.done()):
            self.wait()

    def wait(self) -> None:
        """Until the last save is durable. Raises UserError if it failed."""
        if self._failed:
            raise self._failed
        if self._task:
            with self._telling():
                self._task.result()
            self._task = None

    def close(self) -> None:
        """Wait for the last save, then let go. Raises UserError if the save failed."""
        if self._manager is None:
            return
        try:
            self.wait()
        finally:
            manager, self._manager = self._manager, None
            self._worker.shutdown()
            try:
                manager.close()
            except Exception:
                if not self._failed:
                    raise
            finally:
                if self._staging:
                    self._staging.cleanup()

    def steps(self) -> list[int]:
        """Steps with a folder of their own, oldest first; ``restore`` finds out whether one is whole."""
        if self._mirror:
            return self._mirror.steps()
        return [] if self._manager is None else sorted(self._manager.all_steps())

    def _finish(self, step: int) -> None:
        """In the background: until all parts of a save are durable."""
        self._manager.wait_until_finished()
        if self._mirror:
            self._mirror.push(step, Path(self._local))
            self._mirror.prune(self._config.keep_last, self._config.keep_every)

    def _fetch(self, step: int) -> None:
        """Have a step's files where orbax reads. Raises OSError where they are not whole."""
        if self._mirror and not (Path(self._local) / f"step_{step}").is_dir():
            self._mirror.pull(step, Path(self._local))
            self._manager.reload()

    def record(self, step: int) -> dict[str, Any] | None:
        """The JSON record of a step; None where it cannot be read."""
        try:
            self._fetch(step)
            return self._manager.restore(step, args=ocp.args.Composite(record=ocp.args.JsonRestore())).record
        except Exception:
            return None

    def restore(self, like: Mapping[str, Any], say: Say, *, last: int | None = None) -> Restored | None:
        """The newest whole step (not after `last`) as trees like `like`, shardings included; None if there is no step.

        like: by agent, a tree of arrays or jax.ShapeDtypeStructs with shardings; some of the saved agents will do.
        Damaged steps are skipped, a line each. Raises UserError when there are steps and all are damaged, or when a
        step was saved without an array that is asked for: a fresh optimizer is never made up.
        """
        steps = [step for step in self.steps() if last is None or step <= last]
        for step in reversed(steps):
            record = self.record(step)
            try:
                if record is None:
                    raise _Damaged("its record does not open")
                self._fits(step, like, record)
                return Restored(step, self._read(step, like, record), record)
            except _Damaged as damage:
                say(f"warning: checkpoint of step {step} is damaged and skipped: {damage}")
        if steps:
            raise UserError(f"none of the checkpoints in {self.folder} opens whole (steps {_list(steps)})")
        return None

    def set_aside(self, after: int) -> None:
        """Rename all steps after `after`, which were found damaged, so that they can be saved again."""
        later = [step for step in self.steps() if step > after]
        if jax.process_index() == 0:
            for step in later:
                if self._mirror:
                    self._mirror.drop(step)
                source = epath.Path(self._local) / f"step_{step}"
                target = epath.Path(self._local) / f"{DAMAGED}step_{step}"
                if target.exists():
                    target.rmtree()
                if source.exists():
                    source.rename(target)
        if later:
            if jax.process_count() > 1:
                multihost_utils.sync_global_devices("damaged steps are out of the way")
            self._manager.reload()

    def _fits(self, step: int, like: Mapping[str, Any], record: Mapping[str, Any]) -> None:
        for name, tree in like.items():
            if name not in record["agents"]:
                raise UserError(f"checkpoint of step {step} in {self.folder} was saved without agent {name}")
            saved = record["agents"][name]["arrays"]
            asked = {key: _shape(x) for key, x in flatten(tree).items()}
            lacks = [key for key in asked if key not in saved]
            other = [key for key in asked if key in saved and saved[key] != asked[key]]
            extra = [key for key in saved if key not in asked]
            if lacks or other or extra:
                kinds = {"lacks": lacks, "has in another shape": other, "has besides": extra}
                told = "; ".join(f"{kind} {_list(keys)}" for kind, keys in kinds.items() if keys)
                raise UserError(f"checkpoint of step {step} in {self.folder} does not fit agent {name}: it {told}")

    def _read(self, step: int, like: Mapping[str, Any], record: Mapping[str, Any]) -> dict[str, Any]:
        found = {}
        for name, tree in like.items():
            place = f"{self._local}/step_{step}"
            fault = None
            try:
                flat = {key: load_array(place, name, key, x) for key, x in _placed(flatten(tree)).items()}
            except (ValueError, OSError) as error:
                fault = reason(error)
            if any_host(fault is not None):  # all hosts take the same step
                raise _Damaged(f"agent {name} does not open: {fault or 'another host said so'}")
            if fingerprint(flat) != record["agents"][name]["fingerprint"]:
                raise _Damaged(f"agent {name} has other values than were saved")
            found[name] = unflatten(tree, flat)
        return found

    @contextmanager
    def _telling(self) -> Iterator[None]:
        """Turn whatever goes wrong with a save into one line, kept for every later call."""
        try:
            yield
        except Exception as error:
            kept = self._kept()
            self._task, self._failed = None, UserError(
                f"the checkpoint of step {self._saving} could not be saved in {self.folder}: {reason(error)}; {kept}; "
                "mend the cause, then continue with --resume"
            )  # fmt: skip
            raise self._failed from error

    def _kept(self) -> str:
        try:  # what broke the save may keep us from looking, too
            steps = self._mirror.steps() if self._mirror else self._manager.all_steps(read=True)
        except Exception:
            return "the folder cannot be read now to see which one is the last"
        whole = [step for step in steps if step < self._saving]
        return f"the last complete checkpoint is of step {max(whole)}" if whole else "no earlier one is complete"


class _Damaged(Exception):
    """Why a step is not whole."""


def flatten(tree: Any) -> dict[str, Array]:
    """A tree of arrays as one flat dict with readable names; Nones have no entry."""
    return dict(_named(tree))


def unflatten(like: Any, flat: Mapping[str, Array]) -> Any:
    """The inverse of flatten for a tree of the same shape as `like`."""
    return jax.tree.unflatten(jax.tree.structure(like), [flat[name] for name, _ in _named(like)])


def fingerprint(tree: Any) -> str:
    """A short fingerprint of a tree of arrays, computed where the arrays live: equal values, equal fingerprint.

    It does not depend on the number of devices or the layout.
    """
    leaves = jax.tree.leaves(tree)
    groups: dict[Any, list[int]] = {}
    for at, leaf in enumerate(leaves):  # a jitted function takes arrays of the same devices only
        waits = leaf.sharding.memory_kind == "pinned_host"  # these go to the device one at a time
        groups.setdefault(at if waits else tuple(sorted(device.id for device in leaf.devices())), []).append(at)
    sums: dict[int, Array] = {}
    for key, group in groups.items():
        part = [leaves[at] for at in group]
        if isinstance(key, int):
            kind = next(iter(part[0].devices())).default_memory().kind
            part = [jax.device_put(part[0], part[0].sharding.with_memory_kind(kind))]
        sums |= zip(group, _sums(part), strict=True)
    total = 0
    for at in range(len(leaves)):
        total = (total * 1_000_003 + int(sums[at])) % (1 << 64)
    return f"{total:016x}"


@jax.jit
def _sums(leaves: list[Array]) -> list[Array]:
    def one(x: Array) -> Array:
        kind = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}[x.dtype.itemsize]
        x = x.astype(jnp.uint8) if x.dtype == bool else x
        bits = jax.lax.bitcast_convert_type(x, kind).astype(jnp.uint32)
        # Odd weights by position, so that two swapped values do not cancel; uint32 wraps around. No reshape: the
        # shards stay where they are.
        index, stride = jnp.zeros((), jnp.uint32), 1
        for axis in reversed(range(x.ndim)):
            index = index + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis) * jnp.uint32(stride % 2**32)
            stride *= x.shape[axis]
        return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)

    return [one(x) for x in leaves]


def _meet(*, key: str, timeout_ms: int) -> None:
    """Wait for the other hosts, but not in a thread of orbax after a failure there: the others would never come.

    The failure goes on to ``check``, and from there to the other hosts (hosts.py). In the main thread the exception in
    hand may be the Stop that asks for this save.
    """
    failure = sys.exc_info()[1]
    if failure is not None and threading.current_thread() is not threading.main_thread():
        raise failure
    ocp.multihost.get_barrier_sync_fn()(key=key, timeout_ms=timeout_ms)


def _without_chatter(record: logging.LogRecord) -> bool:
    """A log filter: what matters of orbax, its background threads included, is raised or said here, in one line."""
    return "orbax" not in record.pathname and "orbax" not in record.getMessage()


def _without_late_writes(unraisable: Any) -> None:
    """sys.unraisablehook without tensorstore's: other writes of a save that failed end when its event loop is gone."""
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


def reason(error: BaseException) -> str:
    """The heart of a storage error in a few words."""
    text = " ".join(str(error).split())
    if "No space left" in text or "ENOSPC" in text:
        return "the disk is full (no space left on device)"
    if "File too large" in text or "EFBIG" in text:
        return "the disk quota or file-size limit is reached (file too large)"
    text = re.sub(r"\[[\w]+='.*", "", re.sub(r"^[A-Z_]+: ", "", text))
    return (text[:160] + " ..." if len(text) > 160 else text.strip()) or type(error).__name__


def any_host(mine: bool) -> bool:
    """Whether any host says so."""
    return bool(multihost_utils.process_allgather(np.asarray(mine)).any()) if jax.process_count() > 1 else mine


def _placed(flat: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """What to read, and where it goes: on the mesh, were it a scalar that an initial state leaves on one device."""
    named = [x.sharding for x in flat.values() if isinstance(x.sharding, NamedSharding)]
    on_all = NamedSharding(named[0].mesh, PartitionSpec()) if named else None
    place = lambda own: own if on_all is None or isinstance(own, NamedSharding) else on_all  # noqa: E731
    return {key: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place(x.sharding)) for key, x in flat.items()}


def load_array(folder: str, agent: str, name: str, like: jax.ShapeDtypeStruct) -> Array:
    """One saved array of an agent; folder is a step's. This host reads the shards of its own devices.

    By tensorstore itself: orbax's reader leaves callbacks behind when it meets a damaged file, which print tracebacks
    for as long as the process lives.
    """
    folder = f"{folder}/{_item(agent)}"
    match folder.partition("://"):
        case ("gs", _, path):
            base = {"driver": "gcs", "bucket": path.partition("/")[0], "path": path.partition("/")[2] + "/"}
        case (path, "", _):
            base = {"driver": "file", "path": path + "/"}
        case _:
            base = folder + "/"
    spec = {"driver": "auto", "kvstore": {"driver": "ocdbt", "base": base, "path": name + "/"}}
    stored = tensorstore.open(spec, read=True, open=True).result()
    if (list(stored.shape), stored.dtype.numpy_dtype) != (list(like.shape), like.dtype):
        raise ValueError(f"{name} has shape {list(stored.shape)} and type {stored.dtype.name}")
    indices = like.sharding.addressable_devices_indices_map(like.shape).values()
    parts = {str(index): stored[index].read() for index in indices}  # all at once; str: slices have no hash
    return jax.make_array_from_callback(like.shape, like.sharding, lambda index: parts[str(index)].result())


def _shape(x: Any) -> list[Any]:
    return [*x.shape, str(x.dtype)]


def _item(agent: str) -> str:
    return "agent." + quote(agent, safe="")  # names come from the user: never a path


def _list(items: list[Any]) -> str:
    return ", ".join(map(str, items[:4])) + (f" and {len(items) - 4} more" if len(items) > 4 else "")


def _named(tree: Any) -> Iterator[tuple[str, Array]]:
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        yield jax.tree_util.keystr(path, simple=True, separator="/"), leaf
