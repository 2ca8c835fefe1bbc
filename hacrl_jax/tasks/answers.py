"""The text of an answer -> a typed answer: value, text, list, tuple, set, interval, union, relation, matrix, numeral.

Splitting is by brackets and separators only; expressions inside stay text until compare.py needs their value.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from hacrl_jax.tasks.latex import Unreadable
from hacrl_jax.tasks.normal import TOKEN
from hacrl_jax.tasks.units import split_unit


@dataclass(frozen=True)
class Value:
    """One expression, without its percent sign and unit."""

    text: str
    percent: bool = False
    unit: str = ""


@dataclass(frozen=True)
class Text:
    """Words, as in \\text{east}; ``letter`` where they are one letter that may name a choice."""

    words: str

    @property
    def letter(self) -> str | None:
        return self.words.upper() if len(self.words) == 1 and self.words.isalpha() else None


@dataclass(frozen=True)
class Group:
    """Items between brackets; left and right are "" for a bare list, "(" "[" or "{" otherwise."""

    left: str
    right: str
    items: tuple[Answer, ...]


@dataclass(frozen=True)
class Union:
    parts: tuple[Answer, ...]


@dataclass(frozen=True)
class Relation:
    """sides[0] signs[0] sides[1] ...; signs are = < > \\le \\ge \\ne \\approx \\in."""

    sides: tuple[Answer, ...]
    signs: tuple[str, ...]


@dataclass(frozen=True)
class Matrix:
    rows: tuple[tuple[Answer, ...], ...]


@dataclass(frozen=True)
class Numeral:
    """Digits in a stated base, such as 2516_8."""

    digits: str
    base: int


Answer = Value | Text | Group | Union | Relation | Matrix | Numeral

OPEN = {"(", "[", "{", r"\{", r"\begin", r"\langle", r"\lfloor", r"\lceil"}
CLOSE = {")", "]", "}", r"\}", r"\end", r"\rangle", r"\rfloor", r"\rceil"}
RELATIONS = {"=", "<", ">", r"\le", r"\ge", r"\ne", r"\approx", r"\in"}
BRACKETS = {"(": "(", "[": "[", r"\{": "{", r"\langle": "("}
BRACKETS_CLOSED = {")": "(", "]": "[", r"\}": "{", r"\rangle": "("}
THOUSANDS = re.compile(r"(?<![\d.,])(\d{1,3}(?:,\d{3})+)(?![\d,])")
CONNECTIVE = re.compile(
    r"(\\text\{\s*,?\s*(?:and|or)\s*,?\s*\}|(?<![A-Za-z\\])(?:and|or)(?![A-Za-z]))|\\text\{[^{}]*\}"
)
NUMERAL = re.compile(r"([0-9A-F]+)_\{(?:\\text\{)?(\d{1,2}|two|eight|ten|sixteen)\}?\}")
WORDS = re.compile(r"[^\W\d_](?:[^\W\d_]|[ '\-.])*")
PLAIN_WORDS = re.compile(r"[^\W\d_]{2,}(?:(?: |-|')(?:[^\W\d_]{3,}|an?|of|in|is|to))*", re.IGNORECASE)  # not `p - q`
CHOICE = re.compile(r"\(?([A-Z])(?:\)|[.:](?=\s|$))\s*(.*)|\(([A-Z])\)?", re.DOTALL)


def readings(text: str) -> list[Answer]:
    """The ways to read a normalized answer, likeliest first: `123,456` is a number and a list of two.

    Raises Unreadable for unbalanced brackets and empty parts.
    """
    text = text.strip().rstrip(".,;\\ ")
    text = CONNECTIVE.sub(lambda match: " ; " if match[1] else match.group(), text)
    merged = THOUSANDS.sub(lambda match: match[1].replace(",", ""), text)
    return [parse(merged)] if merged == text else [parse(merged), parse(text)]


def parse(text: str) -> Answer:
    """One normalized answer, with its separators as they stand. Raises Unreadable."""
    tokens = _outer(TOKEN.findall(text))
    if not "".join(tokens).strip():
        raise Unreadable("empty part")
    words = _words(tokens)
    if words is not None:
        return words
    for separators in ({";"}, {","}):
        parts, _ = split(tokens, separators)
        if len(parts) > 1:
            filled = [part for part in parts if "".join(part).strip()]  # `2, and 3` leaves an empty part
            if len(parts) - len(filled) > 1:
                raise Unreadable("empty part")
            return _listed([parse("".join(part)) for part in filled])
    parts, signs = split(tokens, RELATIONS)
    if signs:
        return Relation(tuple(parse("".join(part)) for part in parts), tuple(signs))
    parts, _ = split(tokens, {r"\cup"})
    if len(parts) > 1:
        return Union(tuple(parse("".join(part)) for part in parts))
    return _enclosed(tokens) or _single("".join(tokens).strip())


def _listed(items: list[Answer]) -> Answer:
    """A bare list; what \\pm made two of counts as two items."""
    flat: list[Answer] = []
    for item in items:
        flat.extend(item.items if isinstance(item, Group) and item.left == "" else [item])
    return flat[0] if len(flat) == 1 else Group("", "", tuple(flat))


def split(tokens: list[str], separators: set[str]) -> tuple[list[list[str]], list[str]]:
    """Tokens cut at separators outside brackets, and the separators met. Raises Unreadable for unbalanced brackets."""
    parts: list[list[str]] = [[]]
    met: list[str] = []
    depth = 0
    for token in tokens:
        depth += (token in OPEN) - (token in CLOSE)
        if depth < 0:
            raise Unreadable("unbalanced brackets")
        if depth == 0 and token in separators:
            parts.append([])
            met.append(token)
        else:
            parts[-1].append(token)
    if depth:
        raise Unreadable("unbalanced brackets")
    return parts, met


def _outer(tokens: list[str]) -> list[str]:
    """Without surrounding space and without braces around the whole."""
    while True:
        while tokens and tokens[0].isspace():
            tokens = tokens[1:]
        while tokens and tokens[-1].isspace():
            tokens = tokens[:-1]
        if not (len(tokens) >= 2 and tokens[0] == "{" and tokens[-1] == "}" and _whole(tokens)):
            return tokens
        tokens = tokens[1:-1]


def _whole(tokens: list[str]) -> bool:
    """Does the bracket that the tokens begin with close at their end?"""
    depth = 0
    for index, token in enumerate(tokens):
        depth += (token in OPEN) - (token in CLOSE)
        if depth == 0:
            return index == len(tokens) - 1
    return False


def _words(tokens: list[str]) -> Answer | None:
    """\\text{east}, Evelyn, \\text{(C)} and `(C) 12`; None for anything with mathematics in it."""
    whole = "".join(tokens)
    inner = re.fullmatch(r"\\text\{([^{}]*)\}(?:\^\{\\circ\})?", whole)
    content = (inner[1] if inner else re.sub(r"\\text\{([^{}]*)\}", r"\1", whole)).strip()
    if match := CHOICE.fullmatch(content):
        if match[3] or not match[2] or not content.startswith("(") or inner:
            return Text(match[1] or match[3])
        return Text(match[1])
    if inner:
        if WORDS.fullmatch(content):
            return Text(_folded(content))
        return parse(content) if content and "\\" not in content and content != whole else None
    plain = whole.strip()
    if (
        (len(plain) > 3 or not plain.isascii())
        and PLAIN_WORDS.fullmatch(plain)
        and not re.fullmatch(r"[A-Z]{2,}", plain)
    ):
        return Text(_folded(plain))
    return Text(_folded(plain)) if plain.lower() in ("yes", "no", "odd", "all", "none") else None


def _folded(words: str) -> str:
    return " ".join(words.strip(" .").split()).casefold() if len(words.strip()) > 1 else words.strip()


def _enclosed(tokens: list[str]) -> Answer | None:
    """A tuple, set, interval or matrix; None where the tokens are none of them."""
    tokens = _outer(tokens)
    if matrix := _matrix("".join(tokens)):
        return matrix
    if tokens[0] not in BRACKETS or tokens[-1] not in BRACKETS_CLOSED or not _whole(tokens):
        return None
    left, right = BRACKETS[tokens[0]], BRACKETS_CLOSED[tokens[-1]]
    if (left == "{") != (right == "{"):
        raise Unreadable("unbalanced brackets")
    if left == "{" and not "".join(tokens[1:-1]).strip():
        return Value(r"\emptyset")
    inner = parse("".join(tokens[1:-1]))
    if isinstance(inner, Group) and inner.left == "":
        return Group(left, right, inner.items)
    if left == "{":
        return Group(left, right, (inner,))
    return inner if left == right == "(" else None


def _matrix(text: str) -> Matrix | None:
    # \left[\begin{array}...\end{array}\right] has brackets of its own
    match = re.fullmatch(r"[(\[]?\s*\\begin\{matrix\}(.*)\\end\{matrix\}\s*[)\]]?", text, re.DOTALL)
    if not match or r"\begin" in match[1]:
        return None
    rows = [row for row in re.split(r"\\\\(?:\[[^\]]*\])?|\\cr", match[1].replace(r"\hline", "")) if row.strip()]
    return Matrix(tuple(tuple(parse(cell) for cell in row.split("&")) for row in rows))


def _single(text: str) -> Answer:
    """A value with its percent sign and unit taken off; two values where it has a \\pm."""
    if match := NUMERAL.fullmatch(text.replace(" ", "")):
        named = {"two": 2, "eight": 8, "ten": 10, "sixteen": 16}
        return Numeral(match[1].lstrip("0") or "0", named.get(match[2]) or int(match[2]))
    if r"\pm" in text or r"\mp" in text:
        upper = re.sub(r"\\pm(?![A-Za-z])\s*", "+", re.sub(r"\\mp(?![A-Za-z])\s*", "-", text))
        lower = re.sub(r"\\pm(?![A-Za-z])\s*", "-", re.sub(r"\\mp(?![A-Za-z])\s*", "+", text))
        return Group("", "", (_single(upper), _single(lower)))
    body, unit = split_unit(text)
    percent = re.search(
        r"\s*(?:%|percent|percentage points?)$", f"{body} {unit}".strip() if "percent" in unit else body
    )
    if percent:
        return Value(body.removesuffix("%").strip() if body.endswith("%") else body, percent=True)
    return Value(body, unit=unit)


def values(answer: Answer) -> Iterator[Value]:
    """All expressions inside an answer, left to right."""
    match answer:
        case Value():
            yield answer
        case Matrix():
            for row in answer.rows:
                for cell in row:
                    yield from values(cell)
        case Group(items=parts) | Union(parts=parts) | Relation(sides=parts):
            for part in parts:
                yield from values(part)
