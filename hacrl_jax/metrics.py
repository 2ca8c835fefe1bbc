"""What a run leaves on disk, and the progress bar: metrics.jsonl, TensorBoard, rollouts/*.jsonl, config.yaml.

The training loop uses it so (one writing process; on every other host each call does nothing):

    metrics.check(config, resume=resume, fresh=fresh)         # early, before anything is loaded
    with metrics.Run.open(config, total=steps, resume_step=k, fresh=fresh) as run:
        run.progress(step - 1, "generate small")               # steps completed, what goes on now
        run.rollouts(step, rows)                               # before the update
        run.log({"step": step, "agent": "small", "reward": 0.5, "ratio/own/mean": 1.0})
        run.progress(step)
        run.sync()                                             # durable before a checkpoint of this step counts

Steps count from 1; evaluation before training is step 0. A row carries `step`, mostly `agent`, and scalars; a value
that is not finite becomes null, so that every line is JSON that jq reads. `time/wall` (Unix seconds) is added here:
all keys under `time/` and `tokens_per_second` may differ between two equal runs, no other key.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
import re
import shutil
import statistics
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import quote

from hacrl_jax.config import Config, dump
from hacrl_jax.types import UserError

ROLLOUT_KEYS = ("agent", "prompt", "response", "gold", "reward")
"""What every row of rollouts/*.jsonl holds; agent is the source. The loop may add others (problem, sample, ids)."""

PLAIN_SECONDS = 10.0  # between two progress lines where there is no terminal to redraw


def folder(config: Config) -> Path:
    """runs/NAME. Raises UserError for a name that would leave the runs folder."""
    if config.name in ("", ".", "..") or re.search(r"[/\\\0]", config.name):
        raise UserError(f"name: {config.name!r} cannot name a run folder; use a name without slashes")
    return Path(config.runs) / config.name


def check(config: Config, *, resume: bool = False, fresh: bool = False) -> Path:
    """The run folder, if the run may have it; writes nothing. UserError where it exists and neither was asked."""
    path = folder(config)
    if resume and fresh:
        raise UserError("--resume and --fresh exclude each other")
    if path.exists() and not path.is_dir():
        raise UserError(f"run folder {path} is a file; choose another name=NAME")
    if path.is_dir() and any(path.iterdir()) and not (resume or fresh):
        raise UserError(
            f"run folder {path} exists; --resume continues it, --fresh moves it aside and starts anew, "
            "name=OTHER starts another"
        )
    return path


def move_aside(path: Path) -> Path | None:
    """Rename a run folder to the first free NAME.1, NAME.2, ...; None where there is nothing to move."""
    if not path.is_dir() or not any(path.iterdir()):
        return None
    number = 1
    while (target := path.with_name(f"{path.name}.{number}")).exists():
        number += 1
    path.rename(target)
    return target


def to_json(value: Any) -> str:
    """One line of strict JSON: non-finite numbers as null, array scalars as numbers, arrays as lists."""
    return json.dumps(_plain(value), ensure_ascii=False, allow_nan=False)


def read(path: str | Path) -> list[dict[str, Any]]:
    """The rows of a JSONL file, a last line torn by a crash left out. Raises UserError for any other broken line."""
    path = Path(path)
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    lines = path.read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            rows.append(json.loads(line))
        except ValueError:
            if number == len(lines):  # no newline follows it: the writer was killed in mid-line
                break
            raise UserError(f"{path}: line {number} is not JSON") from None
    return rows


def write_atomic(path: Path, text: str) -> None:
    """Replace a file as a whole or not at all, durably."""
    temporary = path.with_name(path.name + ".tmp")
    with temporary.open("w", encoding="utf-8", newline="\n") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


class Run:
    """An open run folder. ``folder`` is its path, ``writes`` says whether this process writes it."""

    def __init__(self, path: Path, *, writes: bool, total: int, done: int, show: bool):
        self.folder = path
        self.writes = writes
        self._file: TextIO | None = None
        self._lock: TextIO | None = None
        self._boards: dict[str, Any] = {}
        self._bar = _Bar(path.name, total, done) if writes and show else None

    @classmethod
    def open(
        cls,
        config: Config,
        path: Path | None = None,
        *,
        total: int = 0,
        resume_step: int | None = None,
        evaluated: bool = True,
        fresh: bool = False,
        show: bool = True,
        writes: bool | None = None,
    ) -> Run:
        """Make or continue the run folder.

        total: steps of the whole run, for the bar. resume_step: rows after this step are cut from metrics, rollouts
        and TensorBoard (0 keeps the evaluation before training, -1 keeps nothing), and without `evaluated` the
        evaluation of this step too; None is a new run, whose folder must not exist unless `fresh` moves it aside.
        Call it when everything else has been checked: until here
        nothing is written. writes: None is "on the first host only".
        """
        path = path or folder(config)
        if writes is None:
            import jax

            writes = jax.process_index() == 0
        run = cls(path, writes=writes, total=total, done=max(resume_step or 0, 0), show=show)
        if not writes:
            return run
        if resume_step is None:
            check(config, fresh=fresh)
            if path.is_dir():
                _claim(path).close()
            if moved := move_aside(path):
                run.say(f"the former run is now in {moved}")
        (path / "rollouts").mkdir(parents=True, exist_ok=True)
        run._lock = _claim(path)
        write_atomic(path / "config.yaml", dump(config))
        kept = [] if resume_step is None else _cut(path, resume_step, evaluated)
        run._file = (path / "metrics.jsonl").open("a", encoding="utf-8", newline="\n")
        for row in kept:  # TensorBoard's files cannot be cut in place: they are written again from the kept rows
            run._board(row)
        return run

    def log(self, row: Mapping[str, Any]) -> None:
        """Append one row; scalars (also of numpy or jax), strings, None, and lists or dicts of them."""
        if not self.writes:
            return
        row = {"step": int(row["step"]), **_plain(dict(row)), "time/wall": round(time.time(), 3)}
        self._file.write(json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()
        self._board(row).flush()
        if self._bar and "reward" in row:
            self._bar.reward(str(row.get("agent", "")), row["reward"])

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write rollouts/step_NNNNNN.jsonl as a whole; each row has at least ROLLOUT_KEYS, `step` is added."""
        if not self.writes:
            return
        lines = []
        for row in rows:
            assert all(key in row for key in ROLLOUT_KEYS), f"a rollout row needs {ROLLOUT_KEYS}, got {tuple(row)}"
            lines.append(to_json({"step": step, **row}) + "\n")
        write_atomic(self.folder / "rollouts" / f"step_{step:06d}.jsonl", "".join(lines))

    def progress(self, step: int, text: str = "") -> None:
        """Show that `step` steps are complete and `text` goes on; rewards come from the logged rows."""
        if self._bar:
            self._bar.show(step, text)

    def say(self, text: str) -> None:
        """A line for the user that the bar does not overwrite."""
        if self._bar:
            self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def sync(self) -> None:
        """Make all rows so far durable; call before the checkpoint of their step counts."""
        if self._file:
            self._file.flush()
            os.fsync(self._file.fileno())

    def close(self) -> None:
        if self._bar:
            self._bar.stop()
        with ExitStack() as stack:  # all of them, were the disk full
            for part in (self._lock, self._file, *self._boards.values()):
                if part:
                    stack.callback(part.close)
        self._boards, self._file, self._lock, self._bar = {}, None, None, None

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: Any, *_: object) -> None:
        try:
            self.close()
        except OSError:
            if kind is None:  # otherwise the first error is the one to tell
                raise

    def _board(self, row: Mapping[str, Any]) -> Any:
        """Add a row to TensorBoard; the writer, not flushed."""
        from tensorboardX.event_file_writer import EventsWriter  # SummaryWriter's thread hangs the run on a full disk
        from tensorboardX.proto.event_pb2 import Event
        from tensorboardX.proto.summary_pb2 import Summary

        # One TensorBoard "run" per agent, so that equal tags of all agents share a chart.
        name = quote(str(row.get("agent", "all")), safe="")
        if name not in self._boards:
            folder = self.folder / "tensorboard" / name
            folder.mkdir(parents=True, exist_ok=True)
            self._boards[name] = EventsWriter(str(folder / "events"))
        values = [
            Summary.Value(tag=re.sub(r"[^-/\w.]", "_", key), simple_value=value)
            for key, value in row.items() if key not in ("step", "time/wall") and isinstance(value, int | float)
        ]  # fmt: skip
        event = Event(wall_time=row["time/wall"], step=row["step"], summary=Summary(value=values))
        self._boards[name].write_event(event)
        return self._boards[name]


class _Bar:
    """Step, rewards per agent and time left: redrawn on a terminal, else a line now and then."""

    def __init__(self, name: str, total: int, done: int):
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        self.console = Console(stderr=True)
        self.name, self.total, self.done = name, total, done
        self.rewards: dict[str, float | None] = {}
        self.durations: deque[float] = deque(maxlen=20)
        self.last_step = self.last_line = time.monotonic()
        self.live = None
        if self.console.is_terminal:
            columns = (TextColumn("{task.description}", markup=False), BarColumn(bar_width=24), MofNCompleteColumn())
            text = TextColumn("{task.fields[text]}", markup=False)
            self.live = Progress(*columns, TimeElapsedColumn(), text, console=self.console)
            self.task = self.live.add_task(name, total=total or None, completed=done, text="")
            self.live.start()

    def reward(self, agent: str, value: float | None) -> None:
        self.rewards[agent] = value

    def show(self, step: int, text: str) -> None:
        now = time.monotonic()
        if step > self.done:
            self.durations.extend([(now - self.last_step) / (step - self.done)] * (step - self.done))
            self.done, self.last_step = step, now
        parts = [" ".join(f"{agent} {_short(value)}" for agent, value in self.rewards.items()), self.left(), text]
        line = "  ".join(part for part in parts if part)
        if self.live:
            self.live.update(self.task, completed=step, text=line)
        elif now - self.last_line >= PLAIN_SECONDS or (step == self.total and not text):
            self.console.print(f"{self.name} step {step}/{self.total}  {line}", markup=False, soft_wrap=True)
            self.last_line = now

    def left(self) -> str:
        # The median, so that the compilation in the first step does not count for all the others.
        if not self.durations or self.done >= self.total:
            return ""
        seconds = round(statistics.median(self.durations) * (self.total - self.done))
        hours, rest = divmod(seconds, 3600)
        return (f"{hours}:{rest // 60:02d}" if hours else f"{rest // 60}") + f":{rest % 60:02d} left"

    def stop(self) -> None:
        if self.live:
            self.live.stop()


def _short(reward: float | None) -> str:
    return "-" if reward is None else f"{reward:.3f}"


def _claim(path: Path) -> TextIO:
    """Hold a run folder for this process until the file is closed. UserError where another process holds it."""
    file = (path / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UserError(f"run folder {path} is in use by another process; end it first, or choose name=OTHER") from None
    except OSError:  # a file system without locks
        pass
    return file


def _cut(path: Path, step: int, evaluated: bool) -> list[dict[str, Any]]:
    """Drop whatever a run wrote after a step (without `evaluated`, that step's evaluation too); the rows that stay."""
    kept = []
    if (path / "metrics.jsonl").exists():
        rows = [row for row in read(path / "metrics.jsonl") if row["step"] <= step]
        kept = [row for row in rows if evaluated or row["step"] < step or "reward" in row]
    write_atomic(path / "metrics.jsonl", "".join(to_json(row) + "\n" for row in kept))
    for file in (path / "rollouts").glob("step_*"):
        if int(re.match(r"step_(\d+)", file.name)[1]) > step or file.suffix == ".tmp":
            file.unlink()
    shutil.rmtree(path / "tensorboard", ignore_errors=True)
    return kept


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if hasattr(value, "tolist"):  # numpy and jax arrays and scalars
        return _plain(value.tolist())
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
