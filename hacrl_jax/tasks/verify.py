"""Does a response's boxed answer equal the gold answer? One function for training and evaluation: ``verify``.

docs/verification.md states the policy. Nothing here imports JAX, so that a grading process starts fast and small, and
nothing from a model is ever evaluated as code: LaTeX goes through math-verify's grammar behind an alphabet check.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal

MAX_CHARS = 2000  # of a boxed answer, in characters
ERRORS = frozenset({"timeout", "died", "memory", "error"})  # verdicts that blame the grader, not the answer


@dataclass(frozen=True)
class Verdict:
    """correct, and why: `equal`, `different`, `no box`, ... or one of ERRORS."""

    correct: bool
    reason: str


@dataclass(frozen=True)
class Policy:
    """What is a matter of taste; docs/verification.md explains each switch."""

    boxes: Literal["last", "all"] = "last"

    def to_json(self) -> str:
        return json.dumps(asdict(self))


def verify(*, gold: str, prediction: str, policy: Policy = Policy()) -> Verdict:
    """Judge one response. Runs in this process, without a deadline: grader.Grader is the guarded way."""
    answer = extract(prediction, policy)
    return answer if isinstance(answer, Verdict) else judge(gold=gold, answer=answer, policy=policy)


def extract(prediction: str, policy: Policy = Policy()) -> str | Verdict:
    """The content of the last box of a response, or the verdict that there is none. Linear in the response."""
    text = prediction.rpartition("</think>")[2]
    text = text.partition("<think>")[0]
    start = _last_box(text, len(text))
    if start < 0:
        return Verdict(False, "no box")
    content = _braced(text, start)
    if content is None:
        return Verdict(False, "unfinished box")
    if not content.strip():
        return Verdict(False, "empty box")
    if len(content) > MAX_CHARS:
        return Verdict(False, "too long")
    return content.strip()


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


def judge(*, gold: str, answer: str, policy: Policy = Policy()) -> Verdict:
    """Compare the content of a box with the gold answer."""
    if answer.split() == gold.split():
        return Verdict(True, "equal")
    from math_verify import LatexExtractionConfig, parse
    from math_verify import verify as equal

    try:
        parsed = [
            parse(f"\\boxed{{{text}}}", [LatexExtractionConfig()], fallback_mode="no_fallback", parsing_timeout=None)
            for text in (gold, answer)
        ]
        correct = bool(parsed[0]) and bool(parsed[1]) and equal(*parsed, timeout_seconds=None)
    except Exception:
        return Verdict(False, "unparseable")
    return Verdict(correct, "equal" if correct else "different")
