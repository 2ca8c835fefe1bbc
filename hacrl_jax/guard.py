"""What ends a run that cannot go on, in bounded time and with one line that says why.

Signals, a watchdog for a step that hangs, a count of updates without a finite loss, and out-of-memory errors. Each end
has an exit status of its own (docs/runs.md), so that a scheduler knows whether to start the run again.
"""

from __future__ import annotations

import faulthandler
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jax

from hacrl_jax import archive, hosts
from hacrl_jax.config import GuardConfig
from hacrl_jax.types import UserError

STOPPED, STUCK, NOT_FINITE, NO_MEMORY = 75, 76, 77, 78
SAFE = ("generate", "score", "verify", "evaluate")  # phases that change nothing: a signal ends them at once
ADVICE = {
    "load": "spread the parameters over more devices (mesh.fsdp), or train low-rank updates (agents.{agent}.lora)",
    "generate": "lower rollout.slots or rollout.max_response, or set rollout.cache_dtype=bfloat16",
    "evaluate": "lower rollout.slots or rollout.max_response, or set rollout.cache_dtype=bfloat16",
    "exchange": "lower rollout.prompts or rollout.samples",
    "score": "lower agents.{agent}.micro_batch or agents.{agent}.logprob_chunk",
    "update": "lower agents.{agent}.micro_batch or agents.{agent}.logprob_chunk, or set agents.{agent}.remat=full",
}


class Stop(UserError):
    """A signal asked the run to end; its checkpoint is saved and `--resume` goes on."""

    status, word = STOPPED, "stopped"


class NotFinite(UserError):
    status = NOT_FINITE


class NoMemory(UserError):
    status = NO_MEMORY


class Watch:
    """Watches one run while it is entered; not entered, it watches nothing.

    folder: where stacks and offending batches go. check: called at every sign of life, raises what must stop the run.
    skipped: by agent, how many updates in a row have just been skipped; part of a run's checkpoint.
    """

    def __init__(self, config: GuardConfig, folder: Path | None = None, check: Callable[[], None] | None = None,
                 skipped: Mapping[str, int] | None = None):  # fmt: skip
        self.config, self.folder, self.check = config, folder, check
        self.skipped = dict(skipped or {})
        self.what = "start"
        self._signal: signal.Signals | None = None
        self._since = self._signalled = time.monotonic()
        self._safe = False
        self._handlers: dict[signal.Signals, Any] = {}
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Watch:
        if threading.current_thread() is threading.main_thread():
            self._handlers = {each: signal.signal(each, self._on_signal) for each in (signal.SIGTERM, signal.SIGINT)}
        self._done.clear()
        self._since = time.monotonic()
        self._thread = threading.Thread(target=self._look, name="watch", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        for each, handler in self._handlers.items():
            signal.signal(each, handler)
        self._handlers = {}

    def beat(self) -> None:
        """A sign of life in a SAFE phase: raises Stop after a signal, and whatever ``check`` raises."""
        self._alive(None)
        if self._signal and jax.process_count() == 1:
            raise Stop(self._signal.name)

    def turn(self) -> None:
        """The end of a step: raises Stop after a signal to any host, on all hosts alike."""
        self._alive("the end of a step")
        names = hosts.gather("signals", self._signal.name if self._signal else None)
        if name := next(filter(None, names), None):
            raise Stop(name)

    @contextmanager
    def phase(self, name: str, agent: str | None = None) -> Iterator[None]:
        """A part of a step, under which memory errors are explained; in a SAFE one a signal raises Stop at once."""
        self._alive(f"{name}, {agent}" if agent else name)
        safe = self._safe
        with memory(name, agent):
            try:
                # Hosts leave a step together or not at all: with several, it is finished (``turn``).
                self._safe = name in SAFE and jax.process_count() == 1
                if self._safe and self._signal:
                    raise Stop(self._signal.name)
                yield
            finally:
                self._safe = safe

    def finite(self, agent: str, step: int, nonfinite: Sequence[bool], batch: Callable[[int], Any]) -> None:
        """Count updates of a step that were skipped; NotFinite at the limit, with the last such batch on disk.

        nonfinite: one flag per update; batch(m): the record of arrays of update m.
        """
        count, limit = self.skipped.get(agent, 0), self.config.nonfinite
        for m, bad in enumerate(nonfinite):
            count = count + 1 if bad else 0
            if limit and count >= limit:
                path = self.folder / "nonfinite" / f"step_{step:06d}_{quote(agent, safe='')}_{m}.safetensors"
                arrays = {key: x for key, x in vars(batch(m)).items() if x is not None}
                archive.write_arrays(path, jax.device_get(arrays), {"step": step, "agent": agent, "update": m})
                raise NotFinite(
                    f"agent {agent} had {count} updates in a row without a finite loss or gradient (guard.nonfinite), "
                    f"the last one update {m} of step {step}; its batch is in {path}; its parameters are unchanged"
                )
        self.skipped[agent] = count

    def _alive(self, what: str | None) -> None:
        self._since = time.monotonic()
        self.what = what or self.what
        if self.check:
            # A signal waits for its end: raised inside, it would pass for a failure of what is checked.
            safe, self._safe = self._safe, False
            try:
                self.check()
            finally:
                self._safe = safe

    def _on_signal(self, number: int, _frame: Any) -> None:
        if self._signal:
            _end(128 + number, f"second {signal.Signals(number).name}: ended at once")
        self._signal, self._signalled = signal.Signals(number), time.monotonic()
        if self._safe:
            raise Stop(self._signal.name)
        _tell(f"{self._signal.name}: finishing the step ({self.what}), then saving; a second one ends at once")

    def _look(self) -> None:
        """The watching thread. It must not touch the device or take a lock that a stuck main thread may hold."""
        dumped_at, settings = 0.0, self.config
        while not self._done.wait(0.2):
            now = time.monotonic()
            silent = now - self._since
            if self._signal and settings.grace and now - self._signalled > settings.grace:
                _end(
                    STOPPED, f"{self._signal.name}: {self.what} did not end within guard.grace {settings.grace} s; "
                    "ended there; --resume continues at the last complete checkpoint",
                )  # fmt: skip
            if settings.stuck and silent > settings.stuck and self._since != dumped_at:
                dumped_at = self._since
                _tell(f"warning: no sign of life for {silent:.0f} s in {self.what}; stacks are in {self._stacks()}")
            if settings.stuck_exit and silent > settings.stuck_exit:
                _end(STUCK, f"no sign of life for {silent:.0f} s in {self.what} (guard.stuck_exit); ended there; "
                     f"stacks are in {self._stacks()}; --resume continues at the last complete checkpoint")  # fmt: skip

    def _stacks(self) -> Path | str:
        try:
            path = self.folder / "stacks.txt"
            with path.open("a") as file:
                file.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {self.what}\n")
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            return path
        except (OSError, AttributeError):  # a full disk, or no folder
            faulthandler.dump_traceback(sys.__stderr__, all_threads=True)
            return "the lines above"


@contextmanager
def memory(phase: str, agent: str | None = None) -> Iterator[None]:
    """Answer an out-of-memory error of the device with what was being done and the setting to change."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        text = str(error)
        if "RESOURCE_EXHAUSTED" not in text and "out of memory" not in text.lower():
            raise
        doing = "compiling" if re.search(r"compil|HBM usage|memory space", text) else "running"
        whose = f" of agent {agent}" if agent else ""
        advice = ADVICE.get(phase, "lower the batch").format(agent=agent or "NAME")
        raise NoMemory(f"out of memory {doing} {phase}{whose}{_wanted(text)}; {advice}") from error


def _wanted(text: str) -> str:
    if found := re.search(r"allocat\w*\s+(?:request for\s+)?([\d.]+\s?[KMGT]?i?B|\d+ bytes)", text):
        size = found[1]
        if size.endswith(" bytes"):
            size = f"{int(size.split()[0]) / 2**30:.2f} GiB"
        return f", which wanted {size} more"
    if found := re.search(r"Used ([\d.]+[KMGT]?) of ([\d.]+[KMGT]?) (\w+)", text):
        return f", which needs {found[1]} of {found[2]} {found[3]}"
    return ""


def _tell(line: str) -> None:
    # Straight to the file: a signal handler or a watching thread may have interrupted a writer of sys.stderr.
    os.write(2, (line + "\n").encode())


def _end(status: int, line: str) -> None:
    _tell(line)
    os._exit(status)
