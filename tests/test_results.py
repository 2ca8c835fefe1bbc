"""Tables, teams and comparisons from graded answers."""

import itertools

import numpy as np
import pytest

from hacrl_jax import metrics, results
from hacrl_jax.types import UserError


def answers(agent, correct, *, step=0, name="m", wrong="9"):
    """Rows of one agent; a wrong answer is `wrong` in the box."""
    return [
        {
            "agent": agent, "step": step, "set": name, "problem": p, "gold": "1", "sample": s,
            "answer": "1" if right else wrong, "reward": float(right), "tokens": 5, "finish": "stop",
        }
        for p, row in enumerate(correct) for s, right in enumerate(row)
    ]  # fmt: skip


A, B = [[1, 0], [0, 0], [1, 1], [0, 0]], [[1, 1], [0, 1], [1, 1], [0, 0]]


def test_rows_hold_every_measure_with_its_interval():
    (row,) = results.rows(results.collect(answers("ada", A)), at=[1])
    expected = {"avg@2": 3 / 8, "pass@1": 3 / 8, "pass@2": 0.5, "maj@1": 3 / 8, "maj@2": 3 / 8, "best@2": 0.5}
    for measure, value in expected.items():
        key = f"eval/m/{measure}"
        assert row[key] == pytest.approx(value)
        assert row[f"{key}/low"] <= value <= row[f"{key}/high"]
    assert row["eval/m/avg@2/stderr"] == pytest.approx(np.std([0.5, 0, 1, 0], ddof=1) / 2)
    assert (row["eval/m/problems"], row["eval/m/stop_rate"], row["eval/average"]) == (4, 1.0, 3 / 8)


def test_the_headline_is_the_papers():
    found = results.collect(answers("ada", A, name="aime24") + answers("ada", A, name="math500"))
    assert [each.headline for each in found] == ["best@2", "avg@2"]
    lines = results.text(found)
    assert lines[0].split() == ["agent", "step", "aime24", "best@2", "math500", "avg@2", "average"]
    assert lines[1].split()[:5] == ["ada", "0", "50.0", "37.5", "43.8"]
    assert results.average(found)["eval/average"] == pytest.approx((0.5 + 3 / 8) / 2)


def test_the_order_of_the_rows_is_of_no_account():
    rows = answers("ada", A) + answers("bob", B)
    shuffled = [rows[i] for i in np.random.default_rng(0).permutation(len(rows))]
    names = lambda found: sorted(map(metrics.to_json, found))  # noqa: E731
    assert names(results.rows(results.collect(shuffled))) == names(results.rows(results.collect(rows)))


def test_comparison_counts_problems():
    (found,) = results.compare(results.collect(answers("ada", A)), results.collect(answers("ada", B, step=7)))
    assert (found["wins"], found["losses"], found["ties"]) == (2, 0, 2)
    assert found["difference"] == pytest.approx(0.25) and found["p_value"] == pytest.approx(0.5)
    assert found["after"] == "ada at step 7"
    assert "2 wins, 0 losses, 2 ties, p 0.5" in results.comparison_text(found)
    one, both = results.collect(answers("bob", A)), results.collect(answers("ada", A) + answers("bob", B))
    assert [(row["before"], row["after"]) for row in results.compare(both, one)] == [("bob", "bob")]
    assert len(results.compare(one, results.collect(answers("cyd", A)))) == 1  # one agent on either side


def test_comparison_refuses_what_does_not_match():
    here = results.collect(answers("ada", A))
    with pytest.raises(UserError, match="problems of m differ"):
        results.compare(here, results.collect(answers("ada", A[:3])))
    with pytest.raises(UserError, match="no set in common"):
        results.compare(here, results.collect(answers("ada", A, name="other")))


def test_team_measures_join_the_answers_of_all_agents():
    correct = {"ada": [[1], [0], [0], [0]], "bob": [[0], [1], [0], [0]], "cyd": [[1], [0], [1], [0]]}
    wrong = {"ada": "7", "bob": "7", "cyd": "8"}
    found = results.collect(
        itertools.chain.from_iterable(answers(agent, rows, wrong=wrong[agent]) for agent, rows in correct.items())
    )
    (team,) = results.team(found)
    assert team["team/pass@1"] == 0.75
    # votes: 1 1 7 | 7 1 8 (three-way tie) | 7 7 1 | 7 7 8
    assert team["team/maj@1"] == pytest.approx((1 + 1 / 3 + 0 + 0) / 4)
    assert team["solved_alone"] == {"ada": 0.0, "bob": 0.25, "cyd": 0.25}
    assert "pass@1 0.750" in results.team_text(team)
    assert results.team(found[:1]) == []


def test_unfinished_and_foreign_files_are_refused():
    with pytest.raises(UserError, match="from 1 to 2 answers"):
        results.collect(answers("ada", A)[:-1])
    with pytest.raises(UserError, match="not a file of graded answers"):
        results.collect([{"gold": "1"}])
