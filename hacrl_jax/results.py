"""Graded answers -> tables: per benchmark and on average, with intervals; two results compared; agents as a team.

An answer is a dict as ``evaluate`` writes it, one a line of a JSONL file: agent, step, set, problem, gold, sample,
answer (what the box holds, None without one), reward (1 correct, 0 wrong), tokens, finish.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from hacrl_jax import measures, metrics
from hacrl_jax.types import UserError

Answer = Mapping[str, Any]
BEST = "aime"  # sets of this name are told by the best of their samples, as in the paper's tables; others by the mean


@dataclass(frozen=True)
class Result:
    """One agent on one set: P problems in the order of their ids, S answers each."""

    agent: str
    step: int
    name: str  # of the set
    problems: tuple[str, ...]  # id and gold: what must be equal for a comparison
    answers: tuple[tuple[str | None, ...], ...]  # [P, S]
    correct: np.ndarray  # [P, S] float64
    tokens: np.ndarray  # [P, S]
    stopped: np.ndarray  # [P, S] bool

    @property
    def samples(self) -> int:
        return self.correct.shape[1]

    @property
    def headline(self) -> str:
        """The measure that stands for this set in a table."""
        return f"{'best' if BEST in self.name.lower() else 'avg'}@{self.samples}"

    def values(self, measure: str) -> np.ndarray:
        """One value per problem [P] of avg@S, pass@k, maj@k or best@k. Raises UserError for k above S."""
        kind, _, k = measure.partition("@")
        match kind:
            case "avg":
                return measures.avg_at_k(self.correct)
            case "pass":
                return measures.pass_at_k(self.correct, int(k))
            case "best":
                return measures.best_at_k(self.correct, int(k))
            case "maj":
                return measures.maj_at_k(labels([self])[0], self.correct, int(k))
        raise UserError(f"eval: no measure {measure!r}; there are avg, pass, maj and best, such as pass@4")


def collect(answers: Iterable[Answer]) -> list[Result]:
    """Results in the order of their first answers.

    Raises UserError for rows that are no graded answers, and where problems have unequal numbers of answers (an
    evaluation that was interrupted).
    """
    groups: dict[tuple[str, int, str], dict[int, dict[int, Answer]]] = {}
    for row in answers:
        try:
            key = (row["agent"], row["step"], row["set"])
            groups.setdefault(key, {}).setdefault(row["problem"], {})[row["sample"]] = row
        except (KeyError, TypeError):
            raise UserError(
                "eval: not a file of graded answers: a row lacks agent, step, set, problem or sample"
            ) from None
    return [_result(*key, problems) for key, problems in groups.items()]


def _result(agent: str, step: int, name: str, problems: Mapping[int, Mapping[int, Answer]]) -> Result:
    rows = [[problems[id][sample] for sample in sorted(problems[id])] for id in sorted(problems)]
    counts = {len(row) for row in rows}
    if len(counts) > 1:
        raise UserError(
            f"eval: {agent} on {name} has from {min(counts)} to {max(counts)} answers a problem; finish it first"
        )

    def array(field: str) -> np.ndarray:
        return np.asarray([[answer[field] for answer in row] for row in rows])

    return Result(
        agent, step, name, tuple(f"{row[0]['problem']} {row[0]['gold']}" for row in rows),
        tuple(tuple(answer["answer"] for answer in row) for row in rows), array("reward").astype(np.float64),
        array("tokens"), array("finish") == "stop",
    )  # fmt: skip


def labels(results: Sequence[Result]) -> np.ndarray:
    """Labels of the answers for votes, shared by the results (of one set): [n, P, S] int."""
    found = []
    for p in range(len(results[0].problems)):
        answers = [answer for result in results for answer in result.answers[p]]
        correct = [bool(right) for result in results for right in result.correct[p]]
        found.append(measures.vote_labels(answers, correct).reshape(len(results), -1))  # [n, S]
    return np.stack(found, axis=1)


def measured(result: Result, at: Sequence[int] = ()) -> dict[str, float]:
    """All measures of a result under metrics' keys, with standard error and bounds of the 95% bootstrap interval.

    at: the k of pass, maj and best besides all samples. Raises UserError for a k above the samples.
    """
    key, found = f"eval/{result.name}", {}
    for measure in (
        f"avg@{result.samples}",
        *(f"{kind}@{k}" for kind in ("pass", "maj", "best") for k in _sizes(result, at)),
    ):
        values = result.values(measure)
        low, high = measures.interval(values)
        found |= {f"{key}/{measure}": float(values.mean()), f"{key}/{measure}/stderr": stderr(values)}
        found |= {f"{key}/{measure}/low": low, f"{key}/{measure}/high": high}
    return found | {
        f"{key}/problems": len(result.problems), f"{key}/stop_rate": float(result.stopped.mean()),
        f"{key}/tokens": float(result.tokens.mean()),
    }  # fmt: skip


def stderr(values: np.ndarray) -> float:
    """Standard error of the mean over problems; 0 for a single one."""
    return float(values.std(ddof=1) / np.sqrt(len(values))) if len(values) > 1 else 0.0


def average(results: Sequence[Result]) -> dict[str, float]:
    """The mean over the sets of one agent of their headline measures."""
    values = [result.values(result.headline) for result in results]
    low, high = measures.average_interval(values)
    return {
        "eval/average": float(np.mean([v.mean() for v in values])),
        "eval/average/low": low,
        "eval/average/high": high,
    }


def rows(results: Sequence[Result], at: Sequence[int] = ()) -> list[dict[str, Any]]:
    """One row per agent and step, as in metrics.jsonl."""
    return [
        {"step": step, "agent": agent} | {k: v for each in own for k, v in measured(each, at).items()} | average(own)
        for (agent, step), own in _by_agent(results).items()
    ]


def team(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Per set that several agents answered: pass@S and maj@S of all together, and what one alone solved."""
    found = []
    for name in dict.fromkeys(result.name for result in results):
        own = [result for result in results if result.name == name]
        if len(own) < 2:
            continue
        if len({(result.problems, result.samples) for result in own}) > 1:
            raise UserError(f"eval: team measures on {name} need the same problems and samples from every agent")
        correct, samples = np.stack([result.correct for result in own]), own[0].samples
        whole = measures.team_pass_at_k(correct, samples)
        votes = measures.team_maj_at_k(labels(own), correct, samples)
        alone = measures.solved_alone(correct)
        found.append({
            "set": name, "agents": [_named(result) for result in own], "samples": samples,
            f"team/pass@{samples}": float(whole.mean()), f"team/pass@{samples}/interval": measures.interval(whole),
            f"team/maj@{samples}": float(votes.mean()), f"team/maj@{samples}/interval": measures.interval(votes),
            "solved_alone": {_named(result): float(share) for result, share in zip(own, alone, strict=True)},
        })  # fmt: skip
    return found


def compare(before: Sequence[Result], after: Sequence[Result]) -> list[dict[str, Any]]:
    """Paired comparisons of the headline measures, set by set: after against before.

    Agents of one name are compared; where both results have one agent only, those two. Raises UserError where there
    is nothing in common, or a set's problems differ.
    """
    single = all(len({result.agent for result in side}) == 1 for side in (before, after))
    found = []
    for new in after:
        for old in before:
            if old.name != new.name or (old.agent != new.agent and not single):
                continue
            if old.problems != new.problems:
                raise UserError(f"eval: the problems of {new.name} differ between the two results")
            said = asdict(measures.compare(old.values(old.headline), new.values(new.headline)))
            measure = (old.headline, new.headline)
            found.append({"set": new.name, "measure": measure, "before": _named(old), "after": _named(new), **said})
    if not found:
        raise UserError("eval: the two results have no set in common that the same agent answered")
    return found


# ---- text


def told(found: Sequence[Result], before: Sequence[Result], at: Sequence[int], as_json: bool) -> Iterator[str]:
    """Lines for the terminal: tables, the team where there is one, and the comparison with an earlier result if any."""
    if not found:
        return
    groups = team(found)
    changes = compare(before, found) if before else []
    if as_json:
        yield from map(metrics.to_json, [*rows(found, at), *groups, *changes])
    else:
        yield from text(found, at)
        yield from map(team_text, groups)
        yield from map(comparison_text, changes)


def text(results: Sequence[Result], at: Sequence[int] = ()) -> list[str]:
    """The table of headline measures in percent, agents down, sets across; then every measure of every result."""
    heads = {result.name: result.headline for result in results}
    lines = [["agent", "step", *(f"{name} {measure}" for name, measure in heads.items()), "average"]]
    for (agent, step), own in _by_agent(results).items():
        cells = {result.name: f"{100 * result.values(result.headline).mean():.1f}" for result in own}
        mean, low, high = (100 * value for value in average(own).values())
        shown = f"{mean:.1f} [{low:.1f}, {high:.1f}]"
        lines.append([agent, str(step), *(cells.get(name, "-") for name in heads), shown])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    said = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]
    for result in results:
        found, key = measured(result, at), f"eval/{result.name}/"
        said.append(
            f"{_named(result)} on {result.name}: {len(result.problems)} problems, {result.samples} answers each, "
            f"{result.tokens.mean():.0f} tokens, {result.stopped.mean():.0%} ended by themselves"
        )
        for measure in (name.removeprefix(key) for name in found if "@" in name and name.count("/") == 2):
            value, low, high = (found[key + measure + end] for end in ("", "/low", "/high"))
            said.append(f"  {measure:10} {value:.3f} [{low:.3f}, {high:.3f}]")
    return said


def team_text(row: Mapping[str, Any]) -> str:
    """One line of ``team``."""
    samples = row["samples"]
    shown = "  ".join(
        f"{kind}@{samples} {row[f'team/{kind}@{samples}']:.3f} [{low:.3f}, {high:.3f}]"
        for kind in ("pass", "maj") for low, high in [row[f"team/{kind}@{samples}/interval"]]
    )  # fmt: skip
    alone = ", ".join(f"{name} {share:.1%}" for name, share in row["solved_alone"].items())
    return f"team on {row['set']}: {shown}  solved by one alone: {alone}"


def comparison_text(row: Mapping[str, Any]) -> str:
    """One line of ``compare``."""
    return (
        f"{row['after']} against {row['before']} on {row['set']} ({' to '.join(dict.fromkeys(row['measure']))}): "
        f"{100 * row['difference']:+.1f} points [{100 * row['low']:+.1f}, {100 * row['high']:+.1f}], "
        f"{row['wins']} wins, {row['losses']} losses, {row['ties']} ties, p {row['p_value']:.3g}"
    )


def _by_agent(results: Sequence[Result]) -> dict[tuple[str, int], list[Result]]:
    found: dict[tuple[str, int], list[Result]] = {}
    for result in results:
        found.setdefault((result.agent, result.step), []).append(result)
    return found


def _named(result: Result) -> str:
    return f"{result.agent} at step {result.step}" if result.step else result.agent


def _sizes(result: Result, at: Sequence[int]) -> list[int]:
    return sorted({*at, result.samples})
