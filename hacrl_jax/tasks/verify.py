"""Does a response's boxed answer equal the gold answer? One function for training and evaluation: ``verify``.

docs/verification.md states the policy. Nothing here imports JAX, so that a grading process starts fast and small, and
nothing from a model is ever evaluated as code: LaTeX goes through math-verify's grammar behind an alphabet check.
"""

from __future__ import annotations

import functools
import unicodedata
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hacrl_jax.tasks.policy import DEFAULT, Policy

if TYPE_CHECKING:
    from hacrl_jax.tasks.answers import Answer

MAX_CHARS = 2000  # of a boxed answer
MAX_DEPTH = 60  # nested brackets of a boxed answer
ERRORS = frozenset({"timeout", "died", "memory", "error"})  # verdicts that blame the grader, not the answer


@dataclass(frozen=True)
class Verdict:
    """correct, and why: `equal`, `different`, `no box`, ... or one of ERRORS."""

    correct: bool
    reason: str


def verify(*, gold: str, prediction: str, policy: Policy = DEFAULT) -> Verdict:
    """Judge one response. Runs in this process, without a deadline: grader.Grader is the guarded way."""
    answer = extract(prediction, policy)
    return answer if isinstance(answer, Verdict) else judge(gold=gold, answer=answer, policy=policy)


def extract(prediction: str, policy: Policy = DEFAULT) -> str | Verdict:
    """The content of the last box of a response, or the verdict that there is none. Linear in the response."""
    text = prediction.rpartition("</think>")[2]
    text = text.partition("<think>")[0]
    start = _last_box(text, len(text))
    if policy.boxes == "all" and (several := [content for content in boxes(text) if content]):
        return _sized(", ".join(dict.fromkeys(several)))
    if start < 0:
        return Verdict(False, "no box")
    content = _braced(text, start)
    if content is None:
        return Verdict(False, "unfinished box")
    if not content.strip():
        return Verdict(False, "empty box")
    return _sized(content.strip())


def _sized(content: str) -> str | Verdict:
    return content if len(content) <= MAX_CHARS else Verdict(False, "too long")


def boxes(text: str) -> list[str]:
    """Contents of all complete boxes, in the order in which they begin."""
    found, end = [], len(text)
    while (start := _last_box(text, end)) >= 0:
        content = _braced(text, start)
        if content is not None:
            found.append(content.strip())
        end = start
    return found[::-1]


def _last_box(text: str, end: int) -> int:
    return max(text.rfind("\\boxed", 0, end), text.rfind("\\fbox", 0, end))


def _braced(text: str, start: int) -> str | None:
    """The balanced group after the command at ``start``; None where it is absent or never closed."""
    opening = start + (6 if text.startswith("\\boxed", start) else 5)
    while opening < len(text) and text[opening].isspace():
        opening += 1
    if opening == len(text) or text[opening] != "{":
        return None
    depth = 0
    index = opening
    while index < len(text):
        if text[index] == "\\":  # an escaped brace delimits nothing
            index += 2
            continue
        if text[index] in "{}":
            depth += 1 if text[index] == "{" else -1
            if depth == 0:
                return text[opening + 1 : index]
        index += 1
    return None


def judge(*, gold: str, answer: str, policy: Policy = DEFAULT) -> Verdict:
    """Compare the content of a box with the gold answer. No exception but MemoryError leaves it."""
    from hacrl_jax.tasks import compare, latex  # sympy and the grammar: extract's callers need not wait for them

    if fault := unfit(answer):
        return Verdict(False, fault)
    if answer.split() == gold.split():
        return Verdict(True, "equal")
    reason = "different"
    try:
        found = readings(answer)
    except (latex.Unreadable, RecursionError):
        return Verdict(False, "unreadable")
    try:
        wanted = readings(gold)
    except (latex.Unreadable, RecursionError):
        return Verdict(False, "unreadable gold answer")
    for ours in wanted:
        for theirs in found:
            try:
                if compare.equal(ours, theirs, policy):
                    return Verdict(True, "equal")
            except latex.TooLarge:
                reason = "too large"
            except (latex.Unreadable, RecursionError):
                reason = "unreadable"
            except (ArithmeticError, AttributeError, LookupError, NotImplementedError, TypeError, ValueError):
                reason = "unreadable"  # sympy's ways to say that it cannot handle an expression
    return Verdict(False, reason)


def unfit(text: str) -> str | None:
    """Why a text is refused before any parsing: `too long`, `nested too deeply`, `alphabet`; None for none of them."""
    if len(text) > MAX_CHARS:
        return "too long"
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
        if unicodedata.category(letter)[0] == "C" and letter not in "\n\t\r\u200b\u200c\u200d\u2060\ufeff\u00ad":
            return "alphabet"
    return "nested too deeply" if deepest > MAX_DEPTH else None


@functools.lru_cache(maxsize=4096)
def readings(text: str) -> tuple[Answer, ...]:
    """The typed readings of an answer. Raises latex.Unreadable."""
    from hacrl_jax.tasks import answers, normal

    return tuple(answers.readings(normal.normalize(text)))


def readable(gold: str) -> bool:
    """Can answers be compared with this one? Brackets, separators and alphabet only: quick enough for a data set."""
    from hacrl_jax.tasks import answers, latex

    if unfit(gold):
        return False
    try:
        for value in answers.values(readings(gold)[0]):
            if latex.number(value.text) is None:
                latex.check(value.text)
    except (latex.Unreadable, RecursionError):
        return False
    return True
