"""Several hosts, one run: the same command on every host, joined by jax.distributed.

The devices of all hosts make one mesh, and every process runs the same program on it. What happens outside the device
must then be the same everywhere too: ``spread`` shares work whose results could differ (a verifier's deadlines) and
gives all results to all, ``agree`` holds what must be equal against each other. Nothing here waits without a limit, and
whoever fails tells the others why (docs/pods.md). On one host every function is its plain self.
"""

from __future__ import annotations

import functools
import glob
import importlib.util
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeVar

import jax

from hacrl_jax.config import Config, HostsConfig
from hacrl_jax.types import UserError

Row = TypeVar("Row")
FAILED = "hacrl/failed"  # the first failure of any host, in the key-value store of jax.distributed
ALIVE = "hacrl/alive"  # by host, a number that grows while the host lives
LOOK_SECONDS = 0.5  # between two looks at it
BUG = 1  # exit status of what is not a UserError


@dataclass
class _Group:
    """This process's membership; client is the key-value store that all hosts share."""

    client: Any
    wait: float
    rounds: int = 0  # gathers so far, the same number on every host
    done: threading.Event = field(default_factory=threading.Event)


_group: _Group | None = None  # jax.distributed itself exists once per process


def together(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of a Config (its first argument) that runs on all hosts of that config at once."""

    @functools.wraps(function)
    def joined_first(config: Config, *arguments: Any, **options: Any) -> Any:
        with joined(config.hosts):
            return function(config, *arguments, **options)

    return joined_first


@contextmanager
def joined(config: HostsConfig) -> Iterator[None]:
    """Membership in the run of several hosts, where the config or the environment names them; else nothing.

    Must be entered before JAX touches a device. An exception inside ends all processes within seconds, this one
    included (it cannot take part again), with the host and the cause in the last line; a process that dies without a
    word ends the others after config.heartbeat seconds. Raises UserError where the hosts do not find each other.
    """
    global _group
    if _group is not None or not _connect(config):
        yield
        return
    from jax._src.distributed import global_state  # jax offers its key-value store in no public place

    _group = group = _Group(global_state.client, config.wait)
    watcher = threading.Thread(target=_watch, args=(group,), name="hosts", daemon=True)
    watcher.start()
    try:
        yield
    except BaseException as error:
        _stop_all(group, error)
    finally:
        group.done.set()
        watcher.join()
        _group = None


def gather(name: str, value: Any) -> list[Any]:
    """Every host's value, in the order of the hosts. Values are JSON; all hosts must call this in the same order.

    Raises UserError that names the host which did not deliver within config.wait seconds.
    """
    if _group is None:
        return [value]
    client, number, me = _group.client, _group.rounds, jax.process_index()
    _group.rounds += 1
    end = time.monotonic() + _group.wait
    client.key_value_set(f"hacrl/{number}/{me}", json.dumps(value))
    values = []
    for host in range(jax.process_count()):
        left = max(1, int((end - time.monotonic()) * 1000))
        try:
            values.append(json.loads(client.blocking_key_value_get(f"hacrl/{number}/{host}", left)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            raise UserError(
                f"host {host} of {jax.process_count()} did not deliver its part of {name} within {_group.wait:g} s "
                "(hosts.wait); its own log says what it was doing"
            ) from None
    if number:  # all hosts have read the round before: they are in this one
        client.key_value_delete(f"hacrl/{number - 1}/{me}")
    return values


def agree(name: str, value: Any) -> None:
    """Wait for all hosts and compare: UserError where one has another value than the first host."""
    values = gather(name, value)
    for host, other in enumerate(values):
        if other != values[0]:
            raise UserError(f"{name}: host 0 has {_short(values[0])}, host {host} has {_short(other)}; make them equal")


def spread(record: type[Row], function: Callable[..., Sequence[Row]], *columns: Sequence[Any]) -> list[Row]:
    """function(*columns), one record per row: each host does its share of the rows and receives all results.

    record is the dataclass that function returns, with fields that JSON can hold.
    """
    if _group is None:
        return list(function(*columns))
    rows, me, hosts = len(columns[0]), jax.process_index(), jax.process_count()
    mine = function(*(column[rows * me // hosts : rows * (me + 1) // hosts] for column in columns))
    parts = gather(getattr(function, "__name__", "the work"), [vars(row) for row in mine])
    return [record(**row) for part in parts for row in part]


def _connect(config: HostsConfig) -> bool:
    """Join the other processes; False where there are none."""
    settings = _named(config)
    if settings is None:
        return False
    try:
        jax.distributed.initialize(
            **settings,
            initialization_timeout=int(config.start),
            heartbeat_timeout_seconds=int(config.heartbeat),
            shutdown_timeout_seconds=int(config.heartbeat),
        )
    except (RuntimeError, ValueError) as error:
        line = " ".join(str(error).split())[:300]
        raise UserError(
            f"hosts: this process and the others did not find each other within {config.start} s: {line}; check "
            "hosts.coordinator, hosts.count and hosts.index, and that the coordinator's port can be reached"
        ) from None
    return jax.process_count() > 1


def _named(config: HostsConfig) -> dict[str, Any] | None:
    """Arguments of jax.distributed.initialize (empty: what jax finds out by itself), or None for a single host."""
    if config.coordinator:
        return {
            "coordinator_address": config.coordinator, "num_processes": config.count, "process_id": config.index,
        }  # fmt: skip
    here = os.environ.get
    if here("JAX_COORDINATOR_ADDRESS") and here("JAX_NUM_PROCESSES") and here("JAX_PROCESS_ID"):
        return {
            "coordinator_address": here("JAX_COORDINATOR_ADDRESS"), "num_processes": int(here("JAX_NUM_PROCESSES")),
            "process_id": int(here("JAX_PROCESS_ID")),
        }  # fmt: skip
    # A step of one task (a shell on a compute node) is a run of its own.
    several = (int(here(name) or 1) > 1 for name in ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE"))
    return {} if any(several) or _on_tpu() else None


def _on_tpu() -> bool:
    """Whether this is a host with TPUs that will use them: jax then knows the other hosts of the slice."""
    wanted = os.environ.get("JAX_PLATFORMS", "tpu")
    devices = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*")
    return "tpu" in wanted and bool(devices) and importlib.util.find_spec("libtpu") is not None


def _watch(group: _Group) -> None:
    """End this process when another one has failed: the main thread may wait for it inside a program."""
    while not group.done.wait(LOOK_SECONDS):
        with suppress(jax.errors.JaxRuntimeError):  # the service itself is gone: the heartbeat ends that
            group.client.key_value_set(f"{ALIVE}/{jax.process_index()}", str(time.time()), allow_overwrite=True)
        failed = _failure(group.client)
        if failed and failed["host"] != jax.process_index():
            _end(failed["status"], f"{failed['word']}: {_said(failed)}")


def _failure(client: Any) -> dict[str, Any] | None:
    try:
        return json.loads(client.key_value_try_get(FAILED))
    except jax.errors.JaxRuntimeError:  # not there, or the service itself is gone: the heartbeat ends that
        return None


def _silent(client: Any) -> list[int]:
    """The hosts that give no sign of life for a few seconds."""

    def signs() -> list[str | None]:
        found = []
        for host in range(jax.process_count()):
            try:
                found.append(client.key_value_try_get(f"{ALIVE}/{host}"))
            except jax.errors.JaxRuntimeError:  # not yet there, or its keeper is gone
                found.append(None)
        return found

    before = signs()
    time.sleep(8 * LOOK_SECONDS)
    quiet = [host for host, (a, b) in enumerate(zip(before, signs(), strict=True)) if a == b]
    # Without the first host, which keeps the signs, nothing is known of the others.
    return [0] if 0 in quiet else [host for host in quiet if host != jax.process_index()]


def _stop_all(group: _Group, error: BaseException) -> NoReturn:
    """Post why this host stops, and end it."""
    if isinstance(error, jax.errors.JaxRuntimeError):
        time.sleep(2 * LOOK_SECONDS)  # a broken connection is noticed before its reason is posted
        if not _failure(group.client) and (silent := _silent(group.client)):
            names = ", ".join(f"host {host}" for host in silent)
            error = UserError(f"no sign of life from {names}: killed, or its machine is lost; start all with --resume")
    first = _failure(group.client)
    if first and first["host"] != jax.process_index():  # then this is its echo
        _end(first["status"], f"{first['word']}: {_said(first)}")
    expected = isinstance(error, UserError)
    line = " ".join(str(error).split())[:500]
    failed = {
        "host": jax.process_index(), "cause": line if expected else f"{type(error).__name__}: {line}",
        "status": getattr(error, "status", 2) if expected else BUG, "word": getattr(error, "word", "error"),
    }  # fmt: skip
    with suppress(jax.errors.JaxRuntimeError):  # another host was quicker, or nobody is left to be told
        group.client.key_value_set(FAILED, json.dumps(failed))
    _end(failed["status"], f"{failed['word']}: {line}" if expected else "".join(traceback.format_exception(error)))


def _end(status: int, text: str) -> NoReturn:
    """The end of this process, without the farewell of jax.distributed, which waits for all hosts."""
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os.write(2, f"{text.rstrip()}\n".encode())
    # The first host keeps the store: it must outlive the others' next look.
    time.sleep(6 * LOOK_SECONDS if jax.process_index() == 0 else 0)
    os._exit(status)


def _said(failed: dict[str, Any]) -> str:
    return f"host {failed['host']} stopped: {failed['cause']}"


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else text[:77] + "..."
