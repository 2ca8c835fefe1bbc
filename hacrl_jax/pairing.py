"""How one agent's answers arrive at another: two tokenizers exchange texts, as the loop exchanges answers."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hacrl_jax import tokenizer
from hacrl_jax.config import DataConfig
from hacrl_jax.tasks import adapters, arithmetic
from hacrl_jax.tokenizer import Tokenizer
from hacrl_jax.types import Problem

SAMPLE = 200  # texts


@dataclass(frozen=True)
class Pair:
    """How a source's answers arrive at a learner."""

    source: str
    learner: str
    same: bool  # one id-to-token map: ids go over as they are
    texts: int
    lossless: int  # came back whole from source -> learner -> source
    lost: dict[str, int]  # reason -> texts
    inflation: float  # learner's tokens for each of the source's
    over: int  # fit max_response in the source's tokens, and not in the learner's
    collisions: tuple[str, ...]


def pair(source: str, learner: str, own: Tokenizer, other: Tokenizer, texts: Sequence[str], limit: int) -> Pair:
    """Exchange texts between two tokenizers, as answers would be: own is the source's, other the learner's."""
    same = tokenizer.same(own, other)
    lost, whole, before, after, over = Counter[str](), 0, 0, 0, 0
    for text in texts:
        ids = tokenizer.encode(own, text)
        there = tokenizer.Reencoding(text, ids, "") if same else tokenizer.translate(own, other, ids)
        if there.ids is None:
            lost[there.why] += 1
            continue
        back = there if same else tokenizer.translate(other, own, there.ids)
        if back.ids is None:
            lost[f"{back.why} on the way back"] += 1
        whole += back.ids is not None
        before, after = before + len(ids), after + len(there.ids)
        over += len(ids) < limit <= len(there.ids)  # both end with an EOS
    inflation = after / before if before else math.nan
    return Pair(source, learner, same, len(texts), whole, dict(lost), inflation, over,
                tuple(collisions(source, learner, own, other)))  # fmt: skip


def collisions(source: str, learner: str, own: Tokenizer, other: Tokenizer) -> list[str]:
    """Special tokens of two tokenizers that an exchanged text would confuse."""
    mine, theirs = _special(own), _special(other)
    vocabulary, known = own.hf.get_vocab(), other.hf.get_vocab()
    found = [
        f"{token!r} is special for {source} and ordinary for {learner}: it vanishes from {source}'s answers"
        for token in sorted(mine - theirs) if token in known
    ]  # fmt: skip
    found += [
        f"{token!r} is special for {learner} and ordinary for {source}: {learner} reads it as plain characters"
        for token in sorted(theirs - mine) if token in vocabulary
    ]  # fmt: skip
    control = {known[token] for token in theirs}
    for token in sorted(theirs):
        ids = tokenizer.encode(other, token)
        if control & set(ids) or tokenizer.decode(other, ids) != token:
            found.append(f"{token!r} written out in an answer of {source} does not stay plain text for {learner}")
    return found


def sample(config: DataConfig, problems: Sequence[Problem], count: int = SAMPLE) -> tuple[list[str], str]:
    """Texts like the agents' answers, evenly from the data, and what they are: solutions where there are any."""
    if config.source == "arithmetic":
        return [arithmetic.worked(problem) for problem in _evenly(problems, count)], "worked answers"
    solutions = []
    if problems:
        for number, row in enumerate(adapters.rows(config.source, subset=config.subset, split=config.split)):
            if config.limit and number >= config.limit:
                break
            answer = row.get("answer")
            gsm8k = answer if isinstance(answer, str) and "####" in answer else None
            solution = row.get("solution", gsm8k)  # MATH's
            if isinstance(solution, str) and solution.strip():
                solutions.append(solution)
    if solutions:
        return _evenly(solutions, count), "solutions"
    return [f"{p.messages[-1][1]}\n{p.gold}" for p in _evenly(problems, count)], "problems with their answers"


def _special(tok: Tokenizer) -> set[str]:
    return {added.content for added in tok.hf.added_tokens_decoder.values() if added.special}


def _evenly(items: Sequence[Any], count: int) -> list[Any]:
    return [items[at * len(items) // count] for at in range(count)] if len(items) > count else list(items)
