"""Rewards: weights, format, length, and custom functions that misbehave."""

import pytest

from hacrl_jax.config import CustomRewardConfig, LengthRewardConfig, RewardConfig
from hacrl_jax.tasks.rewards import open_custom, reward, shortness, well_formed
from hacrl_jax.tasks.verify import Verdict
from hacrl_jax.types import Problem, UserError

PROBLEMS = [Problem(id=i, messages=(("user", "q"),), gold="1", source="t") for i in range(3)]
RESPONSES = [r"\boxed{1}", "no box", r"<think>a</think> \boxed{2}"]
VERDICTS = [Verdict(True, "equal"), Verdict(False, "no box"), Verdict(False, "different")]
LENGTHS = [5, 50, 100]

FUNCTIONS = """
import time
state = []
def graded(batch): return [2.0 if row["correct"] else 0.0 for row in batch]
def by_length(batch): return [row["length"] / 100 for row in batch]
def unscorable(batch): return [None, 1.0, 1]
def fails(batch): raise ValueError("no\\nidea")
def sleeps(batch): time.sleep(60)
def few(batch): return [1.0]
def nothing(batch): return None
def nan(batch): return [1.0, float("nan"), 0.0]
def words(batch): return ["a", "b", "c"]
def dies(batch):
    import os
    os._exit(3)
def counts(batch):
    state.append(1)
    print("hello")
    return [float(len(state))] * len(batch)
"""


def config_of(path, name, **settings):
    return RewardConfig(custom=(CustomRewardConfig(function=f"{path}:{name}", **settings),))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(FUNCTIONS)
    return path


def given(config, custom=()):
    return reward(config, PROBLEMS, RESPONSES, VERDICTS, LENGTHS, custom)


def test_the_default_is_one_for_correct_and_zero_for_wrong():
    assert given(RewardConfig()) == [1.0, 0.0, 0.0]
    assert given(RewardConfig(correct=2.0, incorrect=-0.5)) == [2.0, -0.5, -0.5]


def test_format_and_length_are_weighted_in():
    length = LengthRewardConfig(weight=0.5, free=40, limit=60)
    assert given(RewardConfig(format=0.1, length=length)) == pytest.approx([1.1, -0.25, 0.1 - 0.5])


@pytest.mark.parametrize(
    ("response", "expected"),
    [(r"\boxed{1}", True), (r"<think>\boxed{1}</think>\boxed{1}", True), ("", False), (r"\boxed{}", False),
     (r"\boxed{1} \boxed{2}", False), (r"<think>\boxed{1}", False), (r"\boxed{1", False)],
)  # fmt: skip
def test_well_formed(response, expected):
    assert well_formed(response) == expected


def test_length_in_its_unit():
    characters = LengthRewardConfig(weight=1.0, unit="characters", free=0, limit=10)
    assert shortness(characters, "x" * 5, 1000) == -0.5
    assert shortness(LengthRewardConfig(weight=1.0, free=0, limit=10), "x" * 500, 5) == -0.5
    assert shortness(characters, "x" * 50, 0) == -1.0


def test_custom_functions_add_to_the_sum_and_keep_their_state(file):
    config = RewardConfig(
        custom=(
            CustomRewardConfig(function=f"{file}:graded", weight=0.5),
            CustomRewardConfig(function=f"{file}:by_length", weight=-1.0),
            CustomRewardConfig(function=f"{file}:counts"),
        )
    )
    with open_custom(config) as custom:
        assert given(config, custom) == pytest.approx([1 + 1 - 0.05 + 1, -0.5 + 1, -1.0 + 1])
        assert given(config, custom) == pytest.approx([1 + 1 - 0.05 + 2, -0.5 + 2, -1.0 + 2])


def test_none_is_not_scorable(file):
    config = config_of(file, "unscorable")
    with open_custom(config) as custom:
        assert given(config, custom) == [None, 1.0, 1.0]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fails", "raised ValueError: no idea"),
        ("sleeps", "took more than 2 s"),
        ("few", "returned 1 scores for 3 responses"),
        ("nothing", "raised TypeError"),
        ("nan", "returned nan for response 1"),
        ("words", "returned 'a' for response 0"),
        ("dies", "died"),
        ("absent", "cannot be loaded: AttributeError"),
    ],
)
def test_a_failing_function_stops_with_one_line_or_drops_the_batch(file, name, said):
    config = config_of(file, name, deadline=2.0 if name == "sleeps" else 60.0)
    with open_custom(config) as custom, pytest.raises(UserError, match=said) as raised:
        given(config, custom)
    assert "\n" not in str(raised.value)
    config = config_of(file, name, deadline=2.0 if name == "sleeps" else 60.0, on_error="drop")
    with open_custom(config) as custom:
        assert given(config, custom) == [None, None, None]
        assert len(custom[0].warnings) == 1
        assert said in custom[0].warnings[0]


def test_paths_are_checked_before_the_run(tmp_path):
    for function in ("nowhere.py:f", "no_colon", f"{tmp_path}:f"):
        config = RewardConfig(custom=(CustomRewardConfig(function=function),))
        with pytest.raises(UserError, match=r"path/to/file\.py:name"), open_custom(config):
            pass


def test_open_functions_must_be_the_configs(file):
    with pytest.raises(UserError, match="1 functions and 0 are open"):
        given(config_of(file, "graded"))


@pytest.mark.parametrize(
    ("content", "said"),
    [("import not_there", "ModuleNotFoundError"), ("x =", "SyntaxError"), ("y = 1", "AttributeErr")],
)
def test_a_function_that_cannot_be_loaded_is_told_at_the_start(tmp_path, content, said):
    path = tmp_path / "mine.py"
    path.write_text(content)
    with open_custom(config_of(path, "f", on_error="drop")) as custom, pytest.raises(UserError, match=said) as raised:
        custom[0].start()
    assert "cannot be loaded" in str(raised.value) and "\n" not in str(raised.value)
