"""Responses and verdicts -> rewards: one weighted sum per response, the same for every agent that learns from it.

A custom function ``path/to/file.py:name`` receives a batch, a list of dicts with id, source, messages, gold, response,
correct, reason and length (tokens of the agent that wrote it), and returns one number or None (not scorable) per dict.
It runs in a process of its own with a deadline, so that one that hangs or dies cannot take the run with it.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from hacrl_jax.config import CustomRewardConfig, LengthRewardConfig, RewardConfig
from hacrl_jax.tasks.verify import Verdict, boxes, extract
from hacrl_jax.types import Problem, UserError

Score = float | None


def reward(
    config: RewardConfig,
    problems: Sequence[Problem],
    responses: Sequence[str],
    verdicts: Sequence[Verdict],
    lengths: Sequence[int],
    custom: Sequence[CustomReward] = (),
) -> list[Score]:
    """One reward per response, None where a custom function says that it cannot be scored.

    problems, responses, verdicts and lengths (tokens) have one entry per response; ``custom`` are the open functions of
    ``config.custom`` (``open_custom``). Raises UserError for a custom function that fails, unless it is ``drop``.
    """
    totals: list[Score] = []
    for response, verdict, length in zip(responses, verdicts, lengths, strict=True):
        total = config.correct if verdict.correct else config.incorrect
        total += config.format * well_formed(response)
        total += config.length.weight * shortness(config.length, response, length)
        totals.append(total)
    if len(custom) != len(config.custom):
        raise UserError(f"reward.custom names {len(config.custom)} functions and {len(custom)} are open")
    batch = [
        {
            "id": problem.id,
            "source": problem.source,
            "messages": problem.messages,
            "gold": problem.gold,
            "response": response,
            "correct": verdict.correct,
            "reason": verdict.reason,
            "length": int(length),
        }
        for problem, response, verdict, length in zip(problems, responses, verdicts, lengths, strict=True)
    ]
    for function in custom:
        scores = function.scores(batch)
        totals = [
            None if total is None or score is None else total + function.config.weight * score
            for total, score in zip(totals, scores, strict=True)
        ]
    return totals


def well_formed(response: str) -> bool:
    """Every <think> closed, and exactly one box after it, complete and not empty."""
    if response.count("<think>") > response.count("</think>"):
        return False
    return not isinstance(extract(response), Verdict) and len(boxes(response.rpartition("</think>")[2])) == 1


def spread(reward: np.ndarray) -> np.ndarray:
    """How far the rewards to one prompt lie apart: [n, B, G] -> [B]. NaNs leave it; 0 where all are NaN."""
    known = ~np.isnan(reward)
    high, low = np.where(known, reward, -np.inf).max(axis=(0, 2)), np.where(known, reward, np.inf).min(axis=(0, 2))
    return np.where(known.any(axis=(0, 2)), high - low, 0.0)


def shortness(config: LengthRewardConfig, response: str, tokens: int) -> float:
    """0 up to ``free``, then falling to -1 at ``limit``, in the configured unit."""
    length = tokens if config.unit == "tokens" else len(response)
    return -min(1.0, max(0, length - config.free) / max(1, config.limit - config.free))


class CustomReward:
    """One open custom function: a context manager around its process, which is started again after a failure.

    ``warnings`` collects one line per batch that was dropped.
    """

    def __init__(self, config: CustomRewardConfig) -> None:
        path, colon, name = config.function.rpartition(":")
        if not colon or not name.isidentifier() or not Path(path).is_file():
            raise UserError(f"reward.custom: {config.function!r} is not path/to/file.py:name of an existing file")
        self.config = config
        self.warnings: list[str] = []
        self._command = [sys.executable, "-m", "hacrl_jax.tasks.custom", str(Path(path).resolve()), name]
        self._process: subprocess.Popen[bytes] | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="hacrl-reward-")

    def __enter__(self) -> CustomReward:
        return self

    def __exit__(self, *_exception: object) -> None:
        self._end()
        self._folder.cleanup()

    def start(self) -> None:
        """Load the function now. Raises UserError where that fails, whatever ``on_error`` says of batches."""
        try:
            self._start()
        except _Failed as failure:
            self._end()
            raise UserError(f"reward.custom: {self.config.function} {failure}") from None

    def tell(self, say: Callable[[str], None]) -> None:
        """Say the warnings since the last time."""
        for line in self.warnings:
            say(f"warning: {line}")
        self.warnings.clear()

    def scores(self, batch: list[dict[str, object]]) -> list[Score]:
        """One score per row. A failure raises UserError, or is a warning and None for all rows under ``drop``."""
        try:
            return self._checked(self._call(batch), len(batch))
        except _Failed as failure:
            self._end()
            line = f"reward.custom: {self.config.function} {failure}"
            if self.config.on_error == "stop":
                raise UserError(f"{line}; reward.custom.on_error=drop would leave such batches out") from None
            self.warnings.append(f"{line}; {len(batch)} responses count as not scorable")
            return [None] * len(batch)

    def _checked(self, scores: object, count: int) -> list[Score]:
        if not isinstance(scores, list) or len(scores) != count:
            given = f"{len(scores)} scores" if isinstance(scores, list) else f"a {type(scores).__name__}"
            raise _Failed(f"returned {given} for {count} responses")
        for index, score in enumerate(scores):
            if score is not None and (not isinstance(score, int | float) or not math.isfinite(score)):
                raise _Failed(f"returned {score!r} for response {index}; a score is a finite number or None")
        return [None if score is None else float(score) for score in scores]

    def _call(self, batch: list[dict[str, object]]) -> object:
        # The batch goes by file: a pipe would block on a function that never reads it.
        request = Path(self._folder.name) / "batch.json"
        request.write_text(json.dumps(batch))
        if self._process is None:
            self._start()
        reply = Path(self._folder.name) / "scores.json"
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps([str(request), str(reply)]).encode() + b"\n")
            self._process.stdin.flush()
        self._done()
        return json.loads(reply.read_text())

    def _done(self) -> None:
        line = self._line(time.monotonic() + self.config.deadline)
        if line.strip() != b"done":
            raise _Failed(line.decode(errors="replace").strip() or "died")

    def _start(self) -> None:
        package_parent = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(part for part in (package_parent, os.environ.get("PYTHONPATH")) if part)
        environment = os.environ | {"PYTHONPATH": path}
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(self._command, stdin=pipe, stdout=pipe, env=environment)
        self._done()

    def _line(self, deadline: float) -> bytes:
        """The child's next line, b"" where it died. Raises _Failed at the deadline."""
        line = b""
        while not line.endswith(b"\n"):
            remaining = deadline - time.monotonic()
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, remaining))
            if not ready:
                raise _Failed(f"took more than {self.config.deadline:g} s")
            chunk = os.read(self._process.stdout.fileno(), 65536)
            if not chunk:
                break
            line += chunk
        return line

    def _end(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
            self._process = None


class _Failed(Exception):
    """What a custom function did wrong, to complete the sentence `path:name ...`."""


@contextlib.contextmanager
def open_custom(config: RewardConfig):
    """The open custom functions of a config, in its order, for ``reward``."""
    with contextlib.ExitStack() as stack:
        yield [stack.enter_context(CustomReward(each)) for each in config.custom]
