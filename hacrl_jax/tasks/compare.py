"""Equality of two typed answers. The gold answer decides what is required; docs/verification.md is the policy."""

from __future__ import annotations

import re
from collections.abc import Sequence
from fractions import Fraction

import sympy

from hacrl_jax.tasks import latex
from hacrl_jax.tasks.answers import Answer, Group, Matrix, Numeral, Relation, Text, Union, Value
from hacrl_jax.tasks.latex import Unreadable
from hacrl_jax.tasks.normal import squeezed
from hacrl_jax.tasks.policy import Policy
from hacrl_jax.tasks.units import known

MIRROR = {"<": ">", ">": "<", r"\le": r"\ge", r"\ge": r"\le", "=": "=", r"\ne": r"\ne", r"\approx": r"\approx"}
DECIMAL = re.compile(r"[+-]?(\d*\.\d+)")


def equal(gold: Answer, answer: Answer, policy: Policy) -> bool:
    """Does the answer say what the gold answer says, all of it? Raises Unreadable for expressions without value."""
    if gold == answer:
        return True
    gold, answer = _aligned(gold, answer, policy)
    match gold, answer:
        case Text(), Text():
            return gold.words == answer.words
        case (Text() as text, Value() as value) | (Value() as value, Text() as text):
            return len(value.text) == 1 and not value.unit and value.text == text.words  # \text{C} and C
        case Numeral(), Numeral():
            return gold == answer
        case Value(), Value():
            return _values(gold, answer, policy)
        case Matrix(), Matrix():
            shapes = [[len(row) for row in matrix.rows] for matrix in (gold, answer)]
            return shapes[0] == shapes[1] and all(map(lambda a, b: _ordered(a, b, policy), gold.rows, answer.rows))
        case Relation(), Relation():
            return _relations(gold, answer, policy)
        case Group(), Group():
            return _groups(gold, answer, policy)
        case (Union(), Union() | Group() | Value()) | (Group() | Value(), Union()):
            return _unions(gold, answer, policy)
        case (Group(left="{", items=(item,)), other) | (other, Group(left="{", items=(item,))):
            return equal(item, other, policy)  # a set of one and its member
        case (Group(), Value(text=r"\mathbb{R}")) | (Value(text=r"\mathbb{R}"), Group()):
            return _unions(gold, answer, policy)
    return False


# ---- shapes that say the same: x = 5 and 5, x > 2 and (2, oo), x in S and S


def _aligned(gold: Answer, answer: Answer, policy: Policy) -> tuple[Answer, Answer]:
    gold, answer = _member(gold), _member(answer)
    if isinstance(gold, Union) != isinstance(answer, Union):
        gold, answer = _either(gold), _either(answer)
    if isinstance(answer, Relation) and not isinstance(gold, Relation):
        return gold, (_region(answer) if isinstance(gold, Group | Union) else None) or _named(answer, policy) or answer
    if isinstance(gold, Relation) and not isinstance(answer, Relation):
        return (_region(gold) if isinstance(answer, Group | Union) else None) or _named(gold, policy) or gold, answer
    return gold, answer


def _member(answer: Answer) -> Answer:
    """x in S says S."""
    if isinstance(answer, Relation) and answer.signs == (r"\in",) and is_name(answer.sides[0]):
        return answer.sides[1]
    return answer


def _either(answer: Answer) -> Answer:
    """`x < 2 or x > 3` as a union of intervals; anything else as it is."""
    if isinstance(answer, Group) and answer.left == "" and all(isinstance(item, Relation) for item in answer.items):
        parts = [_region(item) for item in answer.items]
        return answer if None in parts else Union(tuple(parts))
    return answer


def is_name(answer: Answer) -> bool:
    """x, f(x), \\angle ABC, m_{\\max}, x + y, (x, y), \\text{Area}: what an equation defines. No digits but indices."""
    match answer:
        case Text():
            return True
        case Group(left="("):
            return all(is_name(item) for item in answer.items)
        case Value():
            text = re.sub(r"_\{[^{}]*\}", "", answer.text)
            if answer.percent or not re.search(r"[A-Za-z]", text):
                return False
            if re.fullmatch(r"\\?[A-Za-z]+\s*(?:'+|\^\{\\prime\s*\})?\s*(?:\([^()]*\))?", text):  # f(x), f'(2), P(A)
                return text not in (r"\infty", r"\pi", r"\emptyset")
            return not re.search(r"[\d(']|\\infty|\\prime|\\int|\\frac\{d", text)
    return False


def _named(relation: Relation, policy: Policy) -> Answer | None:
    """What a definition or a chain of equal values says: 5 for x = 5, for x = 10/2 = 5 and for 2 + 3 = 5, else None."""
    if not set(relation.signs) <= {"=", r"\approx"}:
        return None
    sides = relation.sides
    if is_name(sides[0]):
        exact = relation.signs.index(r"\approx") if r"\approx" in relation.signs[1:] else len(sides) - 1
        return sides[max(exact, 1)]
    if len(sides) == 2 and is_name(sides[1]):
        return sides[0]
    if r"\approx" not in relation.signs and all(equal(side, sides[-1], policy) for side in sides[:-1]):
        return sides[-1]
    return None


def _region(relation: Relation) -> Answer | None:
    """The set of one unknown that an inequality with plain bounds describes: [2, oo) for k >= 2; None for others."""
    sides, signs = relation.sides, relation.signs
    low, high, infinity = Value(r"-\infty"), Value(r"\infty"), "("
    if len(sides) == 2 and is_name(sides[1]) and not is_name(sides[0]):
        sides, signs = sides[::-1], (MIRROR.get(signs[0], ""),)
    if len(sides) == 2 and is_name(sides[0]):
        bound, bracket = sides[1], "[" if signs[0] in (r"\le", r"\ge") else "("
        match signs[0]:
            case "<" | r"\le":
                return Group(infinity, bracket, (low, bound))
            case ">" | r"\ge":
                return Group(bracket, infinity, (bound, high))
            case r"\ne":
                return Union((Group("(", "(", (low, bound)), Group("(", "(", (bound, high))))
        return None
    if len(sides) == 3 and is_name(sides[1]):
        if set(signs) <= {">", r"\ge"}:
            sides, signs = sides[::-1], tuple(MIRROR[sign] for sign in signs[::-1])
        if set(signs) <= {"<", r"\le"}:
            return Group(*("[" if sign == r"\le" else "(" for sign in signs), (sides[0], sides[2]))
    return None


# ---- composites


def _ordered(gold: Sequence[Answer], answer: Sequence[Answer], policy: Policy) -> bool:
    return len(gold) == len(answer) and all(equal(a, b, policy) for a, b in zip(gold, answer, strict=True))


def _unordered(gold: Sequence[Answer], answer: Sequence[Answer], policy: Policy) -> bool:
    """The same items in any order, each as often (equality is transitive, so taking the first match is enough)."""
    if len(gold) != len(answer):
        return False
    left = list(answer)
    for item in gold:
        found = next((index for index, other in enumerate(left) if _readably_equal(item, other, policy)), None)
        if found is None:
            return False
        del left[found]
    return True


def _readably_equal(gold: Answer, answer: Answer, policy: Policy) -> bool:
    try:
        return equal(gold, answer, policy)
    except Unreadable:
        return False


def _distinct(items: Sequence[Answer], policy: Policy) -> list[Answer]:
    kept: list[Answer] = []
    for item in items:
        if not any(_readably_equal(item, other, policy) for other in kept):
            kept.append(item)
    return kept


def _groups(gold: Group, answer: Group, policy: Policy) -> bool:
    kinds = {gold.left, answer.left}
    if kinds == {"{"} or kinds == {"", "{"}:
        return _unordered(_distinct(gold.items, policy), _distinct(answer.items, policy), policy)
    if kinds == {""}:
        return _unordered(gold.items, answer.items, policy)
    if "{" in kinds:
        return False
    if "" in kinds:  # a tuple without its parentheses keeps its order; an interval cannot lose its brackets
        enclosed = gold if gold.left else answer
        return (enclosed.left, enclosed.right) == ("(", "(") and _ordered(gold.items, answer.items, policy)
    if len(gold.items) == 2 and (gold.left, gold.right) != (answer.left, answer.right):
        return False
    return _ordered(gold.items, answer.items, policy)


def _unions(gold: Answer, answer: Answer, policy: Policy) -> bool:
    """As sets of numbers where all bounds are numbers, else part by part."""
    sets = [_set(gold), _set(answer)]
    if None not in sets:
        return sets[0] == sets[1]
    parts = [side.parts if isinstance(side, Union) else (side,) for side in (gold, answer)]
    return _unordered(parts[0], parts[1], policy)


def _set(answer: Answer) -> sympy.Set | None:
    match answer:
        case Union():
            parts = [_set(part) for part in answer.parts]
            return None if None in parts else sympy.Union(*parts)
        case Value(text=r"\mathbb{R}"):
            return sympy.S.Reals
        case Value(text=r"\emptyset"):
            return sympy.S.EmptySet
        case Group() if all(isinstance(item, Value) for item in answer.items):
            bounds = [latex.expression(item.text) for item in answer.items]
            if not all(bound.is_extended_real for bound in bounds):
                return None
            if answer.left == "{":
                return sympy.FiniteSet(*bounds)
            if len(bounds) == 2 and answer.left:
                return sympy.Interval(*bounds, left_open=answer.left == "(", right_open=answer.right == "(")
    return None


# ---- equations and inequalities


def _relations(gold: Relation, answer: Relation, policy: Policy) -> bool:
    if {*gold.signs, *answer.signs} <= {"=", r"\approx"} and len(gold.signs) == len(answer.signs) == 1:
        (name, value), (other, found) = gold.sides, answer.sides
        if _same_name(name, other) and is_name(name):
            if isinstance(value, Value) and isinstance(found, Value):
                found = Value(_renamed(found.text, other, name), found.percent, found.unit)
            return equal(value, found, policy)
    regions = [_region(gold), _region(answer)]
    if None not in regions:
        names = [next(side for side in relation.sides if is_name(side)) for relation in (gold, answer)]
        return names[0] == names[1] and equal(regions[0], regions[1], policy)
    ours, theirs = _zeros(gold), _zeros(answer)
    if len(ours) != len(theirs):
        return False
    return all(any(_same_condition(one, other) for other in theirs) for one in ours)


def _same_name(gold: Answer, answer: Answer) -> bool:
    return gold == answer or (None not in (call := [_call(gold), _call(answer)]) and call[0][0] == call[1][0])


def _call(answer: Answer) -> tuple[str, str] | None:
    match = re.fullmatch(r"([A-Za-z])\s*\(\s*([A-Za-z])\s*\)", answer.text) if isinstance(answer, Value) else None
    return (match[1], match[2]) if match else None


def _renamed(text: str, old: Answer, new: Answer) -> str:
    """f(n) = n^2 in the letter of f(x)."""
    was, becomes = _call(old), _call(new)
    if not was or not becomes or was[1] == becomes[1]:
        return text
    return re.sub(rf"(?<![\\A-Za-z]){was[1]}(?![A-Za-z])|(?<=[0-9}}) ]){was[1]}", becomes[1], text)


def _zeros(relation: Relation) -> list[tuple[str, sympy.Expr]]:
    """Each link of a chain as (sign, left - right), greater signs turned round. Raises Unreadable."""
    zeros = []
    for left, sign, right in zip(relation.sides, relation.signs, relation.sides[1:], strict=False):
        if not (isinstance(left, Value) and isinstance(right, Value)) or sign == r"\in":
            raise Unreadable("not an equation of expressions")
        difference = latex.expression(left.text) - latex.expression(right.text)
        zeros.append((MIRROR[sign], -difference) if sign in (">", r"\ge") else (sign, difference))
    return zeros


def _same_condition(gold: tuple[str, sympy.Expr], answer: tuple[str, sympy.Expr]) -> bool:
    sign, expression = gold
    return sign == answer[0] and latex.ratio_is_constant(expression, answer[1], positive=sign in ("<", r"\le"))


# ---- values


def _values(gold: Value, answer: Value, policy: Policy) -> bool:
    if policy.units != "ignore" and None not in (units := (known(gold.unit), known(answer.unit))):
        if units[0] != units[1]:
            return False
    elif policy.units == "require" and gold.unit and gold.unit.split() != answer.unit.split():
        return False
    if gold.percent == answer.percent:
        return same_value(gold.text, answer.text, policy)
    if policy.percent != "value" and same_value(gold.text, answer.text, policy):
        return True
    if policy.percent == "number":
        return False
    scaled = [f"\\frac{{{side.text}}}{{100}}" if side.percent else side.text for side in (gold, answer)]
    exact = [latex.number(side.text) for side in (gold, answer)]
    if None not in exact:
        return exact[0] / (100 if gold.percent else 1) == exact[1] / (100 if answer.percent else 1)
    return same_value(scaled[0], scaled[1], policy)


def same_value(gold: str, answer: str, policy: Policy) -> bool:
    """Are two expressions equal? Exactly, before any tolerance. Raises Unreadable where either has no value."""
    if squeezed(gold) == squeezed(answer):
        return True
    exact = latex.number(gold), latex.number(answer)
    if None in exact:
        left, right = latex.expression(gold), latex.expression(answer)
        if latex.same(left, right):
            return True
    else:
        left, right = (sympy.Rational(value.numerator, value.denominator) for value in exact)
        if exact[0] == exact[1]:
            return True
    if left.free_symbols or right.free_symbols:
        return False
    if _rounds(gold, answer, right, policy) or _rounds(answer, gold, left, policy):
        return True
    if policy.tolerance and latex.number(gold) is not None and re.search(r"[.eE]", gold):
        return bool(abs(left - right).evalf() <= policy.tolerance * abs(left))
    return False


def _rounds(decimal: str, other_text: str, other: sympy.Expr, policy: Policy) -> bool:
    """Is ``decimal`` a literal with enough digits that ``other``, itself no decimal or integer, rounds or cuts to?"""
    match = DECIMAL.fullmatch(re.sub(r"\s+", "", decimal))
    if not match or not policy.rounding or re.fullmatch(r"[+-]?\d*\.?\d*", re.sub(r"\s+", "", other_text)):
        return False
    if len(match[1].replace(".", "").lstrip("0")) < policy.rounding or not other.is_finite:
        return False
    places = len(match[1].partition(".")[2])
    value = latex.number(decimal) or Fraction(0)
    distance = abs(other - sympy.Rational(value.numerator, value.denominator)).evalf(places + 20)
    return bool(distance < sympy.Rational(1, 10**places))
