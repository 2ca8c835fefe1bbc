"""Problems from every source, and grain batches of them.

A pass over the data is a permutation of its own; batches run across the border between passes, so every pass holds
every problem once whatever the batch size, and hosts share each global batch, so the order does not depend on their
number.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grain

from hacrl_jax.config import DataConfig
from hacrl_jax.tasks import adapters, verify
from hacrl_jax.types import Problem, UserError


@dataclass(frozen=True)
class Report:
    """What became of a source's rows."""

    source: str
    rows: int
    kept: int
    dropped: dict[str, tuple[str, ...]] = field(default_factory=dict)  # reason -> "row 3: ..." lines


def problems(config: DataConfig, split: str | None = None) -> tuple[list[Problem], Report]:
    """All problems of a source, in its order, and what was dropped and why.

    Raises UserError when the source cannot be read, has no usable row, or has bad rows without ``allow_bad_rows``.
    """
    found, report = inspect(config, split)
    if report.dropped and not config.allow_bad_rows:
        raise UserError(
            f"data: {config.source}: {_counts(report)}; `hacrl data inspect` lists them, data.allow_bad_rows drops them"
        )
    if not found:
        raise UserError(f"data: {config.source} has no usable row ({_counts(report)})")
    return found, report


def inspect(config: DataConfig, split: str | None = None) -> tuple[list[Problem], Report]:
    """The same, without a complaint about bad rows or none at all."""
    split = split or config.split
    if config.source == "arithmetic":
        from hacrl_jax.tasks import arithmetic

        found = arithmetic.problems(config.arithmetic, split)
        found = found[: config.limit] if config.limit else found
        return found, Report("arithmetic", rows=len(found), kept=len(found))
    return _read(config, split)


def _counts(report: Report) -> str:
    if not report.dropped:
        return f"{report.rows} read"
    counts = ", ".join(f"{len(lines)} {reason}" for reason, lines in report.dropped.items())
    return f"{counts} of {report.rows} rows ({next(iter(report.dropped.values()))[0]})"


def _read(config: DataConfig, split: str) -> tuple[list[Problem], Report]:
    name = config.name or Path(config.source).stem
    rows = adapters.rows(config.source, subset=config.subset, split=split)
    kept: list[tuple[int | None, Problem]] = []  # with the row's own id
    dropped: dict[str, list[str]] = {}
    number = -1
    for number, row in enumerate(rows):
        if config.limit and number >= config.limit:
            number -= 1
            break
        try:
            messages = adapters.messages(row, config.fields, config.instruction)
            gold = adapters.gold(row, config.fields)
        except (KeyError, ValueError, TypeError, AttributeError) as error:
            dropped.setdefault("unreadable", []).append(f"row {number}: {error.args[0] if error.args else error}")
            continue
        fault = gold_fault(gold)
        if fault:
            dropped.setdefault(fault, []).append(f"row {number}: {gold!r}")
        else:
            problem = Problem(id=number, messages=messages, gold=gold, source=name)
            kept.append((adapters.integer_id(row, config.fields), problem))
    report = Report(name, number + 1, len(kept), {reason: tuple(lines) for reason, lines in dropped.items()})
    return _numbered(kept), report


def _numbered(kept: list[tuple[int | None, Problem]]) -> list[Problem]:
    # A data set's own ids where every row has one of its own, else the row's number in the source: neither depends on
    # which other rows are dropped or how many are read.
    ids = [own for own, _ in kept]
    if None in ids or len(set(ids)) < len(ids):
        return [problem for _, problem in kept]
    return [dataclasses.replace(problem, id=own) for own, problem in kept]


# A single backslash in JSON makes a control character of a command's first letter: \frac, \theta, \nu, \right, \beta.
_BROKEN_COMMAND = re.compile(
    r"[\x00-\x08\x0b\x0c\x0e-\x1f]|\t(?:heta|imes|ext|an|au|frac|riangle)|\n(?:eq?|u|abla|ot)\b|\r(?:ight|ho)"
)


def gold_fault(gold: str) -> str | None:
    """Why a gold answer cannot be graded against (empty, control characters, unparseable), or None."""
    if not gold.strip():
        return "empty gold answer"
    if _BROKEN_COMMAND.search(gold):
        return "control character in the gold answer"
    return None if verify.readable(gold) else "unparseable gold answer"


def batches(
    problems: Sequence[Problem], *, batch: int, seed: int, host: int = 0, hosts: int = 1, epochs: int | None = None
) -> Any:
    """A grain iterator over lists of ``batch // hosts`` problems, with ``get_state`` and ``set_state``.

    ``batch`` is the global number of prompts of a step; host h receives rows [h * batch // hosts, ...) of it, so the
    hosts' parts in order are the batch of a single host. With ``epochs`` the iterator ends after ``steps_of`` batches,
    the last filled from the following pass; without, it never ends. No batch holds a problem twice. The state is small,
    a dict of ints.

    Raises UserError when batch exceeds the number of problems or hosts does not divide it.
    """
    if not 0 < batch <= len(problems):
        raise UserError(f"data: a batch of {batch} prompts from {len(problems)} problems; lower rollout.prompts")
    if batch % hosts:
        raise UserError(f"data: {hosts} hosts do not divide a batch of {batch} prompts; change rollout.prompts")
    share = batch // hosts
    steps = steps_of(len(problems), batch=batch, epochs=epochs) if epochs else 2**31
    order = _Order(len(problems), batch, seed)

    def load(step: int) -> list[Problem]:
        begin = step * batch + host * share
        return [problems[order[position]] for position in range(begin, begin + share)]

    data = grain.MapDataset.range(steps).map(load)
    # One thread reads ahead; the state counts what was handed out, not what was read.
    return iter(data.to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=2)))


def steps_of(count: int, *, batch: int, epochs: int) -> int:
    """Batches that ``epochs`` passes over ``count`` problems need."""
    return -(-count * epochs // batch)


def fingerprint(problems: Sequence[Problem]) -> str:
    """A hash of all problems in order: a resumed iterator state is only worth anything over the same data."""
    digest = hashlib.sha256()
    for problem in problems:
        digest.update(repr((problem.id, problem.messages, problem.gold)).encode())
    return digest.hexdigest()[:16]


class _Order:
    """Position in the endless stream of passes -> index of a problem.

    Each pass is grain's seeded shuffle for that pass, in which the problems that the border batch already took from the
    pass before are moved behind that batch: a problem twice in one batch would be answered with the same random
    numbers.
    """

    def __init__(self, count: int, batch: int, seed: int) -> None:
        self.count, self.batch = count, batch
        self.shuffled = grain.MapDataset.range(count).seed(seed).shuffle().repeat()
        self.passes: dict[int, list[int]] = {}  # the last few: a pass depends on the one before

    def __getitem__(self, position: int) -> int:
        number, offset = divmod(position, self.count)
        return self._pass(number)[offset]

    def _pass(self, number: int) -> list[int]:
        first = number
        while first not in self.passes and self._begun(first):
            first -= 1
        for each in range(first, number + 1):
            if each not in self.passes:
                self.passes[each] = self._order(each)
                self.passes.pop(each - 3, None)
        return self.passes[number]

    def _begun(self, number: int) -> int:
        return number * self.count % self.batch  # rows of the border batch that the pass before filled

    def _order(self, number: int) -> list[int]:
        order = [self.shuffled[number * self.count + offset] for offset in range(self.count)]
        begun = self._begun(number)
        if not begun:
            return order
        taken = set(self.passes[number - 1][-begun:])
        head = [index for index in order if index not in taken][: self.batch - begun]
        chosen = set(head)
        return head + [index for index in order if index not in chosen]
