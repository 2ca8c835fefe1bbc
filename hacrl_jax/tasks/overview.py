"""What `hacrl data inspect` shows of a source: counts, what was dropped and why, lengths in each reader's tokens."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hacrl_jax import tokenizer
from hacrl_jax.config import PromptConfig
from hacrl_jax.tasks.data import Report
from hacrl_jax.tokenizer import Tokenizer
from hacrl_jax.types import Problem

SHOWN = 5  # dropped rows of a kind in the text; the JSON holds all


def readers(named: Iterable[tuple[str, str, str | None, PromptConfig]]) -> dict[str, Tokenizer]:
    """Tokenizers of (name, model, revision, prompt settings)."""
    from hacrl_jax.models import resolve

    return {name: tokenizer.load(resolve(model, revision), prompt) for name, model, revision, prompt in named}


def overview(
    problems: Sequence[Problem], report: Report, readers: Mapping[str, Tokenizer], max_prompt: int
) -> dict[str, Any]:
    """A source as one JSON object. readers: tokenizers by the name of the agent or model that reads the prompts.

    A prompt that is longer than max_prompt for any of the agents is left out of training for all of them.
    """
    lengths = {
        name: [len(tokenizer.render(reader, problem)) for problem in problems] for name, reader in readers.items()
    }
    asked = Counter(problem.messages for problem in problems)
    golds: dict[tuple[tuple[str, str], ...], set[str]] = {}
    for problem in problems:
        golds.setdefault(problem.messages, set()).add(problem.gold)
    return {
        "source": report.source, "rows": report.rows, "problems": report.kept,
        "dropped": {reason: list(lines) for reason, lines in report.dropped.items()},
        "repeated": sum(count - 1 for count in asked.values()),
        "contradictory": sum(len(answers) > 1 for answers in golds.values()),
        "question_characters": _spread([sum(len(text) for _, text in problem.messages) for problem in problems]),
        "gold_characters": _spread([len(problem.gold) for problem in problems]),
        "prompt_tokens": {
            name: _spread(found) | {"too_long": sum(length > max_prompt for length in found)}
            for name, found in lengths.items()
        },
        "max_prompt": max_prompt,
        "too_long_for_any": sum(max(row) > max_prompt for row in zip(*lengths.values(), strict=True)),
        "first": [{"messages": [list(turn) for turn in one.messages], "gold": one.gold} for one in problems[:1]],
    }  # fmt: skip


def text(found: Mapping[str, Any]) -> Iterator[str]:
    """The lines of an overview."""
    yield f"{found['source']}: {found['rows']} rows, {found['problems']} problems"
    for reason, lines in found["dropped"].items():
        yield f"dropped, {reason}: {len(lines)}"
        yield from (f"  {line}" for line in lines[:SHOWN])
        if len(lines) > SHOWN:
            yield f"  and {len(lines) - SHOWN} more (--json lists all)"
    if not found["problems"]:
        return
    if found["repeated"]:
        yield f"repeated questions: {found['repeated']}; with different gold answers: {found['contradictory']}"
    yield f"question characters: {_said(found['question_characters'])}; gold: {_said(found['gold_characters'])}"
    limit = found["max_prompt"]
    for name, tokens in found["prompt_tokens"].items():
        yield f"prompt tokens for {name}: {_said(tokens)}; over {limit}: {tokens['too_long']}"
    if len(found["prompt_tokens"]) > 1:
        yield f"left out for all, over {limit} for any of them: {found['too_long_for_any']}"
    for role, content in found["first"][0]["messages"]:
        yield f"first problem, {role}: {content}"
    yield f"first problem, gold: {found['first'][0]['gold']}"


def _spread(values: Sequence[int]) -> dict[str, int]:
    ordered = sorted(values) or [0]
    return {"median": ordered[len(ordered) // 2], "p95": ordered[len(ordered) * 95 // 100], "longest": ordered[-1]}


def _said(spread: Mapping[str, int]) -> str:
    return f"median {spread['median']}, 95% {spread['p95']}, longest {spread['longest']}"
