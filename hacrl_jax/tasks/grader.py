"""Verification in killable worker processes: a hung, dead or memory-hungry worker costs one answer and is replaced.

Deadlines are kept by the parent, which kills the child: no signal handlers, so any thread may grade.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import statistics
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hacrl_jax.config import VerifierConfig
from hacrl_jax.tasks.policy import Policy
from hacrl_jax.tasks.verify import ERRORS, Verdict, extract
from hacrl_jax.types import UserError

STARTUP_SECONDS = 120.0  # importing sympy on a loaded machine; not part of any answer's deadline
MEDIANS = 50  # the deadline is at least this many times the median answer, so that load does not decide rewards
STARTS = 3  # attempts to start one worker before giving up


@dataclass
class Counts:
    """What a grader has seen since it was opened: answers that reached a worker, and what became of them."""

    graded: int = 0
    hung: int = 0  # killed at the deadline
    killed: int = 0  # died by themselves (a signal, the memory bound)
    errors: int = 0  # every answer whose verdict is an error: hung, killed, or failed inside
    seconds: float = 0.0
    slowest: float = 0.0


@dataclass
class _Worker:
    process: subprocess.Popen[bytes]
    started: float
    ready: bool = False
    job: int | None = None
    since: float = 0.0
    buffer: bytearray = field(default_factory=bytearray)


class Grader:
    """A context manager that grades many answers at once in ``config.workers`` child processes.

    Workers start at the first call, stay for the next ones, and are replaced when they hang or die.
    """

    def __init__(self, config: VerifierConfig) -> None:
        self.config = config
        self.policy = Policy(**config.policy.model_dump())
        self.counts = Counts()
        self._workers: list[_Worker] = []
        self._recent: deque[float] = deque(maxlen=256)
        self._failed_starts = 0

    def __enter__(self) -> Grader:
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """End all workers; a later grade starts new ones."""
        for worker in self._workers:
            _end(worker)
        self._workers = []

    @property
    def deadline(self) -> float:
        """Seconds that one answer may take now: the configured ones, or 50 medians where the machine is that slow."""
        median = statistics.median(self._recent) if self._recent else 0.0
        return max(self.config.deadline, MEDIANS * median)

    def grade(self, golds: Sequence[str], predictions: Sequence[str]) -> list[Verdict]:
        """Verdicts in the order of the answers. Equal (gold, answer) pairs are judged once.

        Raises UserError when golds and predictions differ in number, or when more than ``max_error_share`` of the
        answers ended in an error (a hung or dead worker, not a wrong answer).
        """
        if len(golds) != len(predictions):
            raise UserError(f"grade: {len(golds)} gold answers for {len(predictions)} predictions")
        begin = time.monotonic()
        verdicts: list[Verdict | None] = [None] * len(golds)
        jobs: dict[tuple[str, str], list[int]] = {}
        for index, (gold, prediction) in enumerate(zip(golds, predictions, strict=True)):
            answer = extract(prediction, self.policy)
            if isinstance(answer, Verdict):
                verdicts[index] = answer
            else:
                jobs.setdefault((gold, answer), []).append(index)
        judged = self._run(list(jobs))
        for verdict, indices in zip(judged, jobs.values(), strict=True):
            for index in indices:
                verdicts[index] = verdict
        self.counts.seconds += time.monotonic() - begin
        return self._checked([verdict for verdict in verdicts if verdict is not None])

    def _checked(self, verdicts: list[Verdict]) -> list[Verdict]:
        errors = [verdict.reason for verdict in verdicts if verdict.reason in ERRORS]
        self.counts.graded += len(verdicts)
        self.counts.errors += len(errors)
        if errors and len(errors) > self.config.max_error_share * len(verdicts):
            kinds = ", ".join(f"{errors.count(kind)} {kind}" for kind in sorted(set(errors)))
            raise UserError(
                f"verifier: {len(errors)} of {len(verdicts)} answers could not be graded ({kinds}), more than "
                f"verifier.max_error_share {self.config.max_error_share}; raise verifier.deadline or verifier.memory_mb"
            )
        return verdicts

    def _run(self, jobs: list[tuple[str, str]]) -> list[Verdict]:
        verdicts: list[Verdict | None] = [None] * len(jobs)
        waiting = deque(range(len(jobs)))
        while any(verdict is None for verdict in verdicts):
            busy = sum(worker.job is not None for worker in self._workers)
            while len(self._workers) < min(self.config.workers, busy + len(waiting)):
                self._workers.append(_start(self.config, self.policy))
            for worker in list(self._workers):
                if worker.ready and worker.job is None and waiting:
                    self._send(worker, waiting.popleft(), jobs, waiting)
            for worker in self._readable():
                self._receive(worker, verdicts)
            self._expire(verdicts)
        return [verdict for verdict in verdicts if verdict is not None]

    def _readable(self) -> list[_Worker]:
        """Workers with something to read, after a wait until the next deadline at most."""
        now = time.monotonic()
        ends = [self._end_of(worker) for worker in self._workers if worker.job is not None or not worker.ready]
        with selectors.DefaultSelector() as selector:
            for worker in self._workers:
                selector.register(worker.process.stdout, selectors.EVENT_READ, worker)
            return [key.data for key, _ in selector.select(max(0.0, min(ends, default=now) - now))]

    def _end_of(self, worker: _Worker) -> float:
        return worker.since + self.deadline if worker.ready else worker.started + STARTUP_SECONDS

    def _send(self, worker: _Worker, job: int, jobs: list[tuple[str, str]], waiting: deque[int]) -> None:
        gold, answer = jobs[job]
        # An idle worker has an empty pipe and verify.MAX_CHARS keeps a request below a pipe's 64 KiB: never blocks.
        line = json.dumps({"id": job, "gold": gold, "answer": answer}) + "\n"
        worker.job, worker.since = job, time.monotonic()
        try:
            worker.process.stdin.write(line.encode())
            worker.process.stdin.flush()
        except (BrokenPipeError, OSError):  # it died while idle: the answer is not to blame
            worker.job = None
            waiting.appendleft(job)
            self._drop(worker)

    def _receive(self, worker: _Worker, verdicts: list[Verdict | None]) -> None:
        chunk = os.read(worker.process.stdout.fileno(), 65536)
        if not chunk:
            self._died(worker, verdicts)
            return
        worker.buffer += chunk
        while b"\n" in worker.buffer:
            line, _, rest = worker.buffer.partition(b"\n")
            worker.buffer = bytearray(rest)
            reply = json.loads(line)
            if "ready" in reply:
                worker.ready, self._failed_starts = True, 0
            elif reply["id"] == worker.job:
                verdicts[worker.job] = Verdict(reply["correct"], reply["reason"])
                took = time.monotonic() - worker.since
                self._recent.append(took)
                self.counts.slowest = max(self.counts.slowest, took)
                worker.job = None

    def _died(self, worker: _Worker, verdicts: list[Verdict | None]) -> None:
        self._drop(worker)
        if worker.job is not None:
            verdicts[worker.job] = Verdict(False, "died")
            self.counts.killed += 1
        elif not worker.ready:
            self._start_failed(f"status {worker.process.returncode}")

    def _expire(self, verdicts: list[Verdict | None]) -> None:
        now = time.monotonic()
        for worker in list(self._workers):
            if worker.job is not None and now >= self._end_of(worker):
                verdicts[worker.job] = Verdict(False, "timeout")
                self.counts.hung += 1
                self.counts.slowest = max(self.counts.slowest, now - worker.since)
                self._drop(worker)
            elif not worker.ready and now >= self._end_of(worker):
                self._drop(worker)
                self._start_failed(f"no sign of life in {STARTUP_SECONDS:.0f} s")

    def _start_failed(self, reason: str) -> None:
        self._failed_starts += 1
        if self._failed_starts >= STARTS:
            raise UserError(
                f"verifier: a grading worker failed to start {STARTS} times ({reason}); "
                "raise verifier.memory_mb, or run `python -m hacrl_jax.tasks.worker 1024 '{}'` to see why"
            )

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        _end(worker)


def _start(config: VerifierConfig, policy: Policy) -> _Worker:
    package_parent = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (package_parent, os.environ.get("PYTHONPATH")) if part)
    environment = os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "hacrl_jax.tasks.worker", str(config.memory_mb), policy.to_json()]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment
    )
    return _Worker(process, started=time.monotonic())


def _end(worker: _Worker) -> None:
    worker.process.kill()
    worker.process.wait()
    for pipe in (worker.process.stdin, worker.process.stdout):
        with contextlib.suppress(BrokenPipeError):  # bytes that the dead child never read
            pipe.close()
