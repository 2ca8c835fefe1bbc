"""config.reward in the training loop: what answers earn, which lengths count, and what stops a run."""

import jax.numpy as jnp
import numpy as np
import pytest

import hacrl_jax
from hacrl_jax import metrics
from hacrl_jax.algorithm import Ability, judge
from hacrl_jax.config import ObjectiveConfig, RewardConfig, VerifierConfig, resolve
from hacrl_jax.tasks import rewards
from hacrl_jax.tasks.grader import Grader
from hacrl_jax.tasks.verify import Verdict
from hacrl_jax.types import Problem, Rollouts, UserError

FUNCTIONS = """
def first_of_each_pair(batch):
    "Half of the answers can be scored: a quarter of a point per token."
    return [row["length"] / 4 if index % 2 == 0 else None for index, row in enumerate(batch)]
def fails(batch): raise ValueError("no idea")
"""
PROBLEMS = [Problem(id, (("user", "q"),), "1", "t") for id in range(2)]
TEXT = (("a", "bb", "ccc", "d"), ("e", "f", "g", "hhhhh"))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def rollouts(lengths):
    blank = jnp.zeros((4, 8))
    return Rollouts(blank[:2], blank[:2, 0], blank, jnp.asarray(lengths, jnp.int32), blank, blank[:, 0] == 0)


ANSWERED = (rollouts([1, 2, 3, 4]), rollouts([5, 6, 7, 8]))


def judged(reward, monkeypatch, say=lambda _: None):
    """Rewards of two agents, two problems, two samples each, where answers of one character are correct."""

    def verdicts(grader, golds, predictions):
        return [Verdict(len(text) == 1, "equal") for text in predictions]

    monkeypatch.setattr(Grader, "grade", verdicts)
    with rewards.open_custom(reward) as custom:
        found, said = judge(
            PROBLEMS, ANSWERED, TEXT, grader=Grader(VerifierConfig()), config=reward, custom=custom, say=say
        )
    assert [verdict.correct for verdict in said] == [len(text) == 1 for own in TEXT for text in own]
    return found.tolist()


def test_the_default_reward_is_the_verdict(monkeypatch):
    assert judged(RewardConfig(), monkeypatch) == [[1, 0, 0, 1], [1, 1, 1, 0]]


@pytest.mark.parametrize(
    ("unit", "expected"),
    [("tokens", [[-1, -2, -3, -4], [-5, -6, -7, -8]]), ("characters", [[-1, -2, -3, -1], [-1, -1, -1, -5]])],
)
def test_length_is_in_tokens_of_the_agent_that_answered_or_in_characters(monkeypatch, unit, expected):
    reward = {"correct": 0.0, "length": {"weight": 10.0, "unit": unit, "limit": 10}}
    np.testing.assert_allclose(judged(RewardConfig.model_validate(reward), monkeypatch), expected)


def test_answers_that_cannot_be_scored_are_nan_and_said(monkeypatch, file):
    reward = {"custom": [{"function": f"{file}:first_of_each_pair"}]}
    nan = np.nan
    np.testing.assert_equal(
        judged(RewardConfig.model_validate(reward), monkeypatch), [[1.25, nan, 0.75, nan], [2.25, nan, 2.75, nan]]
    )
    reward = {"custom": [{"function": f"{file}:fails"}]}
    with pytest.raises(UserError, match=r"ValueError: no idea; reward.custom.on_error=drop"):
        judged(RewardConfig.model_validate(reward), monkeypatch)
    said = []
    reward["custom"][0]["on_error"] = "drop"
    assert np.isnan(judged(RewardConfig.model_validate(reward), monkeypatch, said.append)).all()
    assert len(said) == 1 and "8 responses count as not scorable" in said[0]


def test_too_many_errors_of_the_grader_stop_with_the_reason(monkeypatch):
    monkeypatch.setattr(Grader, "_run", lambda self, jobs: [Verdict(False, "died")] * len(jobs))
    boxed = [tuple(rf"\boxed{{{text}}}" for text in own) for own in TEXT]
    with pytest.raises(UserError, match=r"8 of 8 answers could not be graded .8 died.*max_error_share"):
        judge(PROBLEMS, ANSWERED, boxed, grader=Grader(VerifierConfig()), config=RewardConfig(), custom=(), say=print)


def test_capability_counts_what_could_be_scored():
    nan, objective = np.nan, ObjectiveConfig()
    ability = Ability(np.zeros((0, 2))).observe(np.array([[1, nan, 0, nan], [1, 1, nan, 1]]), objective)
    ability = ability.observe(np.array([[0, 0, 0, 1], [nan, nan, nan, nan]]), objective)
    np.testing.assert_equal(ability.history, [[0.5, 1.0], [0.25, 1.0]])
    ability = Ability(np.zeros((0, 2))).observe(np.full((2, 4), nan), objective)
    np.testing.assert_equal(ability.history, [[0.0, 0.0]])


def test_spread_leaves_nan_out():
    nan = np.nan
    reward = np.array([[[1, nan], [nan, nan], [0, 1]], [[1, 1], [nan, nan], [0, 0]]])
    np.testing.assert_equal(rewards.spread(reward), [0, 0, 1])


def config(runs, **changes):
    folder = f"{hacrl_jax.__path__[0]}/agents"
    return resolve({
        "name": "rewarded", "runs": str(runs), "steps": 2, "minibatch": 4,
        "agents": [
            {"name": "ada", "model": f"{folder}/tiny-qwen3-a", "optimizer": {"lr": 1e-3}},
            {"name": "lia", "model": f"{folder}/tiny-llama", "optimizer": {"lr": 1e-3}},
        ],
        "data": {"source": "arithmetic", "arithmetic": {"digits": 1, "size": 16}},
        "rollout": {"prompts": 4, "samples": 2, "max_prompt": 32, "max_response": 24},
        "objective": {"eps_low": 0.02, "eps_high": 0.02, "delta": 0.5, "kl_coefficient": 0.0},
        "eval": {"before": False, "after": False}, "verifier": {"workers": 1}, "checkpoint": {"every": 0},
    } | changes)  # fmt: skip


@pytest.mark.slow
def test_a_run_with_a_custom_reward(tmp_path, file):
    custom = {"correct": 2.0, "custom": [{"function": f"{file}:first_of_each_pair"}]}
    folder = hacrl_jax.train(config(tmp_path, reward=custom), show=False).folder
    answers = metrics.read(folder / "rollouts" / "step_000001.jsonl")
    for answer in answers:
        correct = 2.0 if answer["verdict"] == "equal" else 0.0
        assert answer["reward"] == (correct + answer["tokens"] / 4 if answer["sample"] == 0 else None)
    rows = metrics.read(folder / "metrics.jsonl")
    assert len(rows) == 4
    for row in rows:
        assert row["unscorable"] == 4 and row["nonfinite"] == 0 and row["loss"] is not None
        if row["step"] == 1:
            scored = [a["reward"] for a in answers if a["agent"] == row["agent"] and a["reward"] is not None]
            assert row["reward"] == pytest.approx(np.mean(scored)) and row["capability"] == 1.0


@pytest.mark.parametrize("function", ["nowhere.py:f", "mine.py:not_there"])
def test_a_custom_reward_that_is_not_there_stops_before_anything_is_written(tmp_path, file, monkeypatch, function):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=function):
        hacrl_jax.train(config(tmp_path, reward={"custom": [{"function": function}]}), show=False)
    assert not (tmp_path / "rewarded").exists()
