"""The embedded task: seeded, disjoint, verified answers; worked answers that are right, or wrong as they say."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hacrl_jax.config import ArithmeticConfig
from hacrl_jax.tasks import arithmetic
from hacrl_jax.types import Problem, UserError


def made(a: int, operation: str, b: int) -> Problem:
    item = arithmetic.Sum(a, operation, b)
    value = {"+": a + b, "-": a - b, "*": a * b}[operation]
    return Problem(id=0, messages=(("user", arithmetic.question(item)),), gold=str(value), source="arithmetic")


def box(text: str) -> int:
    return int(re.fullmatch(r".*\\boxed\{(-?\d+)\}", text, re.DOTALL)[1])


operands = st.one_of(
    st.tuples(st.integers(0, 10**6), st.sampled_from("+-"), st.integers(0, 10**6)),
    st.tuples(st.integers(0, 10**6), st.just("*"), st.integers(0, 9)),
)


@given(operands)
def test_worked_answers_are_right_and_every_line_of_them_holds(item):
    problem = made(*item)
    *lines, _ = arithmetic.worked(problem).split("\n")
    assert box(arithmetic.worked(problem)) == int(problem.gold)
    for line in lines:
        left, relation, right = re.fullmatch(r"([\d+*-]+)([<>=])(\d+)", line).groups()
        value = total(left)
        assert {"<": value < int(right), ">": value > int(right), "=": value == int(right)}[relation], line


def total(text: str) -> int:
    first, *rest = re.findall(r"([+*-]?)(\d+)", text)
    value = int(first[1])
    for sign, digits in rest:
        value = {"+": value + int(digits), "-": value - int(digits), "*": value * int(digits)}[sign]
    return value


@given(operands)
def test_wrong_variants_are_wrong_and_the_others_are_the_right_answer(item):
    problem = made(*item)
    wrong = arithmetic.variants(problem)
    assert "slip" in wrong
    for name in wrong:
        assert box(arithmetic.worked(problem, name)) != int(problem.gold)


@pytest.mark.parametrize(("item", "variant", "text"), [
    ((47, "+", 38), "right", "7+8=15\n4+3+1=8\n\\boxed{85}"),
    ((47, "+", 38), "no_carry", "7+8=15\n4+3=7\n\\boxed{75}"),
    ((7, "+", 95), "right", "7+5=12\n0+9+1=10\n\\boxed{102}"),
    ((53, "-", 82), "right", "53<82\n12-3=9\n8-5-1=2\n\\boxed{-29}"),
    ((53, "-", 82), "dropped_sign", "53<82\n12-3=9\n8-5-1=2\n\\boxed{29}"),
    ((82, "-", 53), "no_borrow", "82>53\n3-2=1\n8-5=3\n\\boxed{31}"),
    ((100, "-", 1), "right", "100>1\n10-1=9\n10-0-1=9\n1-0-1=0\n\\boxed{99}"),
    ((6, "-", 6), "right", "6=6\n6-6=0\n\\boxed{0}"),
    ((47, "*", 8), "right", "7*8=56\n4*8+5=37\n\\boxed{376}"),
    ((47, "*", 8), "off_by_ten", "7*8=46\n4*8+4=36\n\\boxed{366}"),
    ((47, "*", 8), "no_carry", "7*8=56\n4*8=32\n\\boxed{326}"),
    ((40, "*", 0), "slip", "0*0=1\n4*0=0\n\\boxed{1}"),
])  # fmt: skip
def test_the_answers_a_reader_would_write(item, variant, text):
    assert arithmetic.worked(made(*item), variant) == text


@pytest.mark.parametrize(("item", "skill"), [
    ((42, "+", 35), "+"), ((47, "+", 38), "+carry"), ((47, "-", 35), "-"), ((42, "-", 35), "-borrow"),
    ((35, "-", 47), "-negative"), ((32, "-", 35), "-negative"), ((12, "*", 3), "*"), ((12, "*", 9), "*carry"),
])  # fmt: skip
def test_skills(item, skill):
    assert arithmetic.skill(made(*item)) == skill


def test_train_and_test_are_disjoint_whatever_seed_and_size():
    train = [
        problem.messages
        for seed, digits in ((0, 1), (0, 2), (1, 2), (0, 4))
        for problem in arithmetic.problems(ArithmeticConfig(seed=seed, digits=digits, size=5000), "train")
    ]
    test = arithmetic.problems(ArithmeticConfig(seed=2, size=5000), "test")
    test += arithmetic.problems(ArithmeticConfig(digits=4, size=5000), "test")
    assert not set(train) & {problem.messages for problem in test}


def test_problems_follow_from_the_seed_and_a_larger_set_starts_with_the_smaller():
    small, large = (arithmetic.problems(ArithmeticConfig(size=size), "train") for size in (100, 1000))
    assert large[:100] == small
    assert arithmetic.problems(ArithmeticConfig(size=100, seed=1), "train") != small
    assert [problem.id for problem in large] == list(range(1000))


def test_a_held_out_set_has_no_problem_twice_and_all_operations():
    problems = arithmetic.problems(ArithmeticConfig(size=540), "test")
    assert len({problem.messages for problem in problems}) == 540
    operations = [arithmetic.parse(problem).operation for problem in problems]
    assert {operation: operations.count(operation) for operation in "+-*"} == {"+": 180, "-": 180, "*": 180}
    assert len({arithmetic.skill(problem) for problem in problems}) == 7


def test_sizes_beyond_the_space_repeat_and_go_on():
    problems = arithmetic.problems(ArithmeticConfig(digits=1, operations=("+",), size=500), "train")
    assert len(problems) == 500
    distinct = len({problem.messages for problem in problems})
    assert distinct == len({problem.messages for problem in problems[:distinct]}) < 100


@pytest.mark.parametrize("digits", [1, 3, 9])
def test_digits(digits):
    for problem in arithmetic.problems(ArithmeticConfig(digits=digits, size=300), "train"):
        a, operation, b = arithmetic.parse(problem)
        assert a < 10**digits
        assert b < (10 if operation == "*" else 10**digits)
        assert box(arithmetic.worked(problem)) == int(problem.gold)


def test_mistakes_of_the_user():
    with pytest.raises(UserError, match=r"choose among \+, -, \*"):
        arithmetic.problems(ArithmeticConfig(operations=("+", "/")), "train")
    with pytest.raises(UserError, match="at most 9"):
        arithmetic.problems(ArithmeticConfig(digits=10), "train")
