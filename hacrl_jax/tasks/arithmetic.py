"""The embedded task: seeded arithmetic problems, with right and systematically wrong worked answers for warm-up.

A problem is one chat message, ``What is 47+38? Answer in \\boxed{}.``; `+` and `-` take two operands of at most
`digits` digits, `*` multiplies one by a single digit. An answer works column by column, units first, and ends in
the box::

    7+8=15        53<82         7*8=56
    4+3+1=8       12-3=9        4*8+5=37
    \\boxed{85}    8-5-1=2       \\boxed{376}
                  \\boxed{-29}

Whether a problem belongs to train or test depends on its text alone, so no seed, size or digits can mix the two.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from typing import Literal, NamedTuple

import numpy as np

from hacrl_jax.config import ArithmeticConfig
from hacrl_jax.types import Problem, UserError

Split = Literal["train", "test"]
Variant = Literal["right", "slip", "no_carry", "no_borrow", "dropped_sign", "off_by_ten"]
"""How an answer goes: right, or wrong in one consistent way.

slip          the units column is one too high          7+8=16
no_carry      carries are forgotten                     7+8=15, 4+3=7, so 75
no_borrow     the smaller digit leaves the larger       12-3 becomes 3-2=1
dropped_sign  a negative difference loses its minus     29
off_by_ten    the first product is ten off              7*8=46
"""
OPERATIONS = ("+", "-", "*")
TEST_SHARE = 5  # one problem in five is a test problem
_LISTED = 1 << 20  # spaces up to this size are listed, so that no problem comes twice before all have come once
_QUESTION = re.compile(r"What is (\d+)([-+*])(\d+)\?")


class Sum(NamedTuple):
    """The operands and the operation of a problem."""

    a: int
    operation: str
    b: int


def problems(config: ArithmeticConfig, split: Split) -> list[Problem]:
    """config.size problems; the first n do not depend on the size. The operations take turns.

    Within an operation all problems differ until all have come, where there are at most a million (`+` and `-` up to
    three digits); then, and beyond, they may repeat. Raises UserError for an unknown operation or too many digits.
    """
    unknown = [operation for operation in config.operations if operation not in OPERATIONS]
    if unknown or not config.operations:
        raise UserError(f"arithmetic.operations {list(config.operations)}: choose among {', '.join(OPERATIONS)}")
    if config.digits > 9:
        raise UserError(f"arithmetic.digits {config.digits}: at most 9")
    streams = [_sums(operation, config, split) for operation in config.operations]
    turns = (next(streams[i % len(streams)]) for i in range(config.size))
    return [
        Problem(id=i, messages=(("user", question(item)),), gold=str(_value(item)), source="arithmetic")
        for i, item in enumerate(turns)
    ]


def question(item: Sum) -> str:
    return f"What is {item.a}{item.operation}{item.b}? Answer in \\boxed{{}}."


def parse(problem: Problem) -> Sum:
    """The operands of a problem made here. Raises ValueError for another."""
    match = _QUESTION.match(problem.messages[-1][1])
    if match is None:
        raise ValueError(f"not an arithmetic problem: {problem.messages[-1][1]!r}")
    return Sum(int(match[1]), match[2], int(match[3]))


def worked(problem: Problem, variant: Variant = "right") -> str:
    """The worked answer of a variant; where the variant has nothing to get wrong, it equals the right one."""
    item = parse(problem)
    match item.operation:
        case "+":
            lines, result = _add(item.a, item.b, variant)
        case "-":
            lines, result = _subtract(item.a, item.b, variant)
        case _:
            lines, result = _multiply(item.a, item.b, variant)
    return "\n".join([*lines, f"\\boxed{{{result}}}"])


def variants(problem: Problem) -> tuple[Variant, ...]:
    """The variants whose box is wrong for this problem."""
    right = parse(problem)
    wrong: tuple[Variant, ...] = ("slip", "no_carry", "no_borrow", "dropped_sign", "off_by_ten")
    return tuple(name for name in wrong if not worked(problem, name).endswith(f"\\boxed{{{_value(right)}}}"))


def skill(problem: Problem) -> str:
    """What the problem asks for: the operation, then `carry`, `borrow` or `negative` where it needs that."""
    item, wrong = parse(problem), variants(problem)
    if item.operation == "-" and item.a < item.b:
        return "-negative"
    if "no_borrow" in wrong:
        return "-borrow"
    return item.operation + ("carry" if "no_carry" in wrong else "")


def _value(item: Sum) -> int:
    return {"+": item.a + item.b, "-": item.a - item.b, "*": item.a * item.b}[item.operation]


def _sums(operation: str, config: ArithmeticConfig, split: Split) -> Iterator[Sum]:
    width = 10 if operation == "*" else 10**config.digits
    space = 10**config.digits * width
    rng = np.random.default_rng([config.seed, config.digits, ord(operation)])
    while True:
        indices = rng.permutation(space) if space <= _LISTED else rng.integers(space, size=4096)
        for index in indices:
            item = Sum(int(index) // width, operation, int(index) % width)
            if _split(item) == split:
                yield item


def _split(item: Sum) -> Split:
    digest = hashlib.blake2b(question(item).encode(), digest_size=8).digest()
    return "train" if int.from_bytes(digest, "big") % TEST_SHARE else "test"


def _columns(a: int, b: int) -> list[tuple[int, int]]:
    """Digit pairs, units first."""
    width = max(len(str(a)), len(str(b)))
    return [(a // 10**i % 10, b // 10**i % 10) for i in range(width)]


def _add(a: int, b: int, variant: Variant) -> tuple[list[str], int]:
    lines, result, carry = [], 0, 0
    for i, (x, y) in enumerate(_columns(a, b)):
        value = x + y + carry + (variant == "slip" and i == 0)
        lines.append(f"{x}+{y}{'+1' if carry else ''}={value}")
        result += value % 10 * 10**i
        carry = value // 10 if variant != "no_carry" else 0
        last = value // 10 * 10 ** (i + 1)
    return lines, result + last


def _subtract(a: int, b: int, variant: Variant) -> tuple[list[str], int]:
    lines = [f"{a}{'<' if a < b else '>' if a > b else '='}{b}"]
    result, borrow = 0, 0
    for i, (x, y) in enumerate(_columns(max(a, b), min(a, b))):
        slip = int(variant == "slip" and i == 0)
        if variant == "no_borrow" and x < y:
            x, y = y, x
        lent = int(x - y - borrow < 0)
        value = x + 10 * lent - y - borrow + slip
        lines.append(f"{x + 10 * lent}-{y}{'-1' if borrow else ''}={value}")
        result += value % 10 * 10**i
        borrow = lent
    return lines, -result if a < b and variant != "dropped_sign" else result


def _multiply(a: int, b: int, variant: Variant) -> tuple[list[str], int]:
    lines, result, carry = [], 0, 0
    for i, x in enumerate(int(digit) for digit in reversed(str(a))):
        value = x * b + carry
        if i == 0 and variant == "slip":
            value += 1
        if i == 0 and variant == "off_by_ten":
            value += -10 if value >= 10 else 10
        lines.append(f"{x}*{b}{f'+{carry}' if carry else ''}={value}")
        result += value % 10 * 10**i
        carry = value // 10 if variant != "no_carry" else 0
        last = value // 10 * 10 ** (i + 1)
    return lines, result + last
