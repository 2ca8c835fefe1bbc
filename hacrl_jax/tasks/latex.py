"""A LaTeX expression -> a bounded sympy expression, and equality of two of them.

math-verify's LaTeX grammar (latex2sympy2_extended) builds the tree with evaluation off; ``_evaluated`` then evaluates
it from the leaves and refuses every node whose value would be too large to write down. The grammar reads no code, and
text reaches it only behind ``check``: length, alphabet, nesting.
"""

from __future__ import annotations

import functools
import re
from fractions import Fraction

import sympy
from antlr4 import PredictionMode, Token
from latex2sympy2_extended.latex2sympy2 import ConversionConfig, _Latex2Sympy
from sympy.core.function import AppliedUndef

MAX_LENGTH = 600  # characters of one expression
MAX_DEPTH = 24  # nested groups
MAX_COMMANDS = 60  # \frac, \sin, ...: the grammar takes long over many functions without brackets
MAX_NODES = 400  # of a parsed tree
MAX_BITS = 40_000  # of a number's numerator or denominator: 10^10000 passes, 9^(9^9) does not
MAX_FACTORIAL = 2_000
MAX_TERMS = 200  # of a written-out sum or product
DIGITS = 60  # decimal digits of a numeric comparison
AGREE = sympy.Float(10) ** -40  # relative difference below which two such values are the same

ALPHABET = re.compile(r"[A-Za-z0-9\s+\-*/^_=<>()\[\]{}|,.;:!'&%\\]*")
NUMBER = re.compile(
    r"([+-]{0,2})(\d+\.?\d*|\.\d+)(?:[eE]([+-]?\d{1,4})|(?:\*|\\times|\\cdot)10\^(?:(\d)|\{([+-]?\d{1,4})\}))?"
)
FRACTION = re.compile(r"([+-]{0,2})(\d*)\\frac\{([+-]?\d+)\}\{(\d+)\}|([+-]{0,2})(\d+)/(\d+)")


class _Grammar(_Latex2Sympy):
    """math-verify's LaTeX grammar with exact numbers; its own reading of a number is sympify's, and that is eval.

    It enters at the grammar's rule for expressions (sets, lists and relations are answers.py's) in ANTLR's quick
    prediction mode, which finds the full mode's tree or none; only then the full mode has a try. Four times as fast.
    """

    def parse(self, latex_str: str) -> sympy.Basic:
        try:
            return self._parsed(latex_str, PredictionMode.SLL)
        except (MemoryError, RecursionError):
            raise
        except Exception:  # the listener raises bare Exception
            return self._parsed(latex_str, PredictionMode.LL)

    def _parsed(self, text: str, mode: int) -> sympy.Basic:
        parser = self.create_parser(text)
        parser._interp.predictionMode = mode
        tree = parser.expr()
        if parser.getTokenStream().LA(1) != Token.EOF:
            raise Unreadable("not an expression")
        return self.convert_expr(tree)

    def parse_number(self, text: str) -> sympy.Rational:
        exact = number(text.replace(",", ""))
        if exact is None:
            raise Unreadable("not a number")
        return sympy.Rational(exact.numerator, exact.denominator)


class Unreadable(Exception):
    """The text is not an expression that can be compared by value."""


class TooLarge(Unreadable):
    """Its value would be too large, or take too long, to compute."""


def number(text: str) -> Fraction | None:
    """The exact value of a plain number: integer, decimal, scientific, fraction or mixed number; None for others.

    `4\\frac{10}{3}` is no mixed number: None. Expects normal.normalize's spelling.
    """
    text = re.sub(r"(?<=\d)\s+(\d+)\s*/\s*(\d+)\s*$", r"\\frac{\1}{\2}", text)  # `2 1/2` is a mixed number
    if re.search(r"\d[\d.]*\s+[\d.]", text):
        return None
    compact = re.sub(r"\s+", "", text)
    if match := NUMBER.fullmatch(compact):
        sign, digits, *exponents = match.groups()
        exponent = int(next((part for part in exponents if part), "0"))
        if len(digits) > MAX_BITS // 4 or abs(exponent) > MAX_BITS // 4:
            return None
        return _signed(sign, _decimal(digits) * Fraction(10) ** exponent)
    if match := FRACTION.fullmatch(compact):
        sign, whole, top, bottom, plain_sign, plain_top, plain_bottom = match.groups()
        top, bottom = int(top or plain_top), int(bottom or plain_bottom)
        if bottom == 0 or (whole and not 0 < top < bottom):
            return None
        return _signed(sign or plain_sign or "", int(whole or 0) + Fraction(top, bottom))
    return None


def _decimal(digits: str) -> Fraction:
    whole, _, part = digits.partition(".")
    return Fraction(int(whole + part or "0"), 10 ** len(part))


def _signed(sign: str, value: Fraction) -> Fraction:
    return -value if sign.count("-") % 2 else value


def check(text: str) -> None:
    """Refuse what no final answer needs before any parser sees it. Raises Unreadable or TooLarge."""
    if len(text) > MAX_LENGTH:
        raise TooLarge("expression too long")
    if not ALPHABET.fullmatch(text) or "__" in text:
        raise Unreadable("alphabet")
    depth = deepest = 0
    for letter in text:
        depth += (letter in "([{") - (letter in ")]}")
        deepest = max(deepest, depth)
    if deepest > MAX_DEPTH or text.count("^") > MAX_DEPTH or text.count("\\frac") > 2 * MAX_DEPTH:
        raise TooLarge("expression nested too deeply")
    if re.search(r"\\(?:i*int|oint|lim|partial|operatorname|xrightarrow)(?![A-Za-z])", text):
        raise Unreadable("not a closed form")
    if len(re.findall(r"\\[A-Za-z]{2,}", text)) > MAX_COMMANDS:
        raise TooLarge("expression too long")
    if re.search(r"\d[\d.]*\s+[\d.]", text) or re.search(r"\d\s*\\frac\{\d", text):
        raise Unreadable("two numbers side by side")  # `4 10/3`: neither a product nor a mixed number


@functools.lru_cache(maxsize=2048)
def expression(text: str) -> sympy.Expr:
    """Parse and evaluate an expression in normal.normalize's spelling.

    Raises Unreadable; TooLarge where a value passes the bounds above.
    """
    exact = number(text)
    if exact is not None:
        return sympy.Rational(exact.numerator, exact.denominator)
    text = re.sub(r"(?<![\d^_{.])(\d+)\s*\\frac\{(\d+)\}\{(\d+)\}", _mixed, text)
    text = re.sub(r"(?<![\w.])(\d+\.?\d*)[eE]([+-]?\d{1,3})(?!\w)", r"(\1\\cdot10^{\2})", text)
    check(text)
    text = _SUBSCRIPT.sub(_symbol, text)
    text = _POWER.sub(r"{\1}^", text.replace(r"\gamma", r"\varsigma"))
    try:
        with sympy.evaluate(False):
            tree = _Grammar(config=ConversionConfig(lowercase_symbols=False)).parse(text)
    except (MemoryError, RecursionError):
        raise
    except Exception as error:  # the grammar and its listeners raise bare Exception and whatever sympy raises
        raise Unreadable("not an expression") from error
    if not isinstance(tree, sympy.Expr):
        raise Unreadable("not an expression")
    if sum(1 for _ in sympy.preorder_traversal(tree)) > MAX_NODES:
        raise TooLarge("expression too long")
    value = _evaluated(tree)
    if not isinstance(value, sympy.Expr) or value.has(sympy.nan, sympy.zoo):
        raise Unreadable("not a value")
    return value


# Spellings that the grammar reads alike, and the quick mode without a conflict: an indexed letter as one accented
# symbol, a power of a symbol with the symbol in braces. \gamma would be Euler's constant, so another letter stands in.
_SUBSCRIPT = re.compile(r"(?<![A-Za-z\\])(\\(?!log|sum|prod|max|min|lim|ln|gcd)[A-Za-z]+|[A-Za-z])\s*_\{([^{}]*)\}")
_POWER = re.compile(
    r"(?<![A-Za-z\\])(\\mathit\{\w+\}|\\(?!pi|sin|cos|tan|cot|sec|csc|log|ln|exp)[A-Za-z]+|[A-DF-Za-df-z])\s*\^"
)


def _symbol(match: re.Match[str]) -> str:
    name = match[1].lstrip("\\") + "_" + match[2].strip()
    return "\\mathit{" + re.sub(r"[^A-Za-z0-9]", lambda other: f"Z{ord(other[0])}Z", name) + "}"


def _mixed(match: re.Match[str]) -> str:
    whole, top, bottom = match.groups()
    return f"({whole}+\\frac{{{top}}}{{{bottom}}})" if 0 < int(top[:9]) < int(bottom[:9]) else match.group()


def _evaluated(node: sympy.Basic) -> sympy.Basic:
    """The tree evaluated from its leaves, every step within the bounds."""
    if isinstance(node, sympy.Integer | sympy.Rational) and max(abs(node.p), node.q).bit_length() > MAX_BITS:
        raise TooLarge("number too large")
    if isinstance(node, sympy.Symbol):
        return _CONSTANTS.get(node.name, sympy.Symbol(node.name))
    if not node.args:
        return node
    if isinstance(node, sympy.Sum | sympy.Product):
        return _written_out(node)
    if isinstance(node, sympy.Integral | sympy.Limit | sympy.Derivative | sympy.MatrixBase | sympy.MatrixExpr):
        raise Unreadable("not a closed form")
    parts = [_evaluated(part) for part in node.args]
    if isinstance(node, AppliedUndef):  # `x(y)` may be a product or a function: read alike on both sides; `I(0)` is one
        name = node.func.__name__
        return sympy.Symbol(f"{name}{tuple(parts)}") if parts[0].is_number else sympy.Mul(sympy.Symbol(name), *parts)
    if isinstance(node, sympy.UnevaluatedExpr):
        return parts[0]
    _bound(node, parts)
    try:
        value = node.func(*parts)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise Unreadable("not a value") from error
    if value.is_Pow and value.exp.is_Rational and abs(value.exp) > MAX_BITS:  # (x^1000)^1000
        raise TooLarge("power too large")
    return value


_CONSTANTS = {"i": sympy.I, "math{i}": sympy.I, "e": sympy.E, "math{e}": sympy.E, "math{d}": sympy.Symbol("d")}


def _bound(node: sympy.Basic, parts: list[sympy.Basic]) -> None:
    """Raise TooLarge when applying the node's function to these values could blow up."""
    if isinstance(node, sympy.Pow):
        base, exponent = parts
        if exponent.is_number:
            size = abs(complex(exponent.evalf(15))) if exponent.is_finite else 0.0
            bits = max(abs(base.p), base.q).bit_length() if base.is_Rational else 8 * sum(1 for _ in base.args) + 8
            if size * max(1, bits - 1) > MAX_BITS:
                raise TooLarge("power too large")
        elif any(power.exp.free_symbols for power in exponent.atoms(sympy.Pow)) or exponent.has(sympy.factorial):
            raise TooLarge("tower of powers")  # x^(x^x)
    elif isinstance(node, sympy.exp):
        if parts[0].is_number and parts[0].is_finite and abs(complex(parts[0].evalf(15))) > MAX_BITS:
            raise TooLarge("power too large")
    elif isinstance(node, sympy.factorial | sympy.gamma | sympy.binomial | sympy.factorial2 | sympy.ff | sympy.rf):
        for part in parts:
            if part.is_number and abs(complex(part.evalf(15))) > MAX_FACTORIAL:
                raise TooLarge("factorial too large")
            if part.has(sympy.factorial, sympy.gamma, sympy.binomial) or any(
                power.exp.free_symbols for power in part.atoms(sympy.Pow)
            ):
                raise TooLarge("factorial too large")
    elif isinstance(node, sympy.Add | sympy.Mul):
        bits = sum(max(abs(part.p), part.q).bit_length() for part in parts if part.is_Rational)
        if bits > 2 * MAX_BITS:
            raise TooLarge("number too large")


def _written_out(node: sympy.Sum | sympy.Product) -> sympy.Basic:
    if len(node.limits) != 1:
        raise Unreadable("not a closed form")
    variable, low, high = node.limits[0]
    low, high = _evaluated(low), _evaluated(high)
    if not (low.is_Integer and high.is_Integer):
        raise Unreadable("not a closed form")
    if high - low >= MAX_TERMS:
        raise TooLarge("too many terms")
    terms = [_evaluated(node.function.xreplace({variable: sympy.Integer(k)})) for k in range(int(low), int(high) + 1)]
    return (sympy.Add if isinstance(node, sympy.Sum) else sympy.Mul)(*terms)


def same(first: sympy.Expr, second: sympy.Expr) -> bool:
    """Are two expressions equal as functions of their symbols?

    Rationals exactly; other numbers to 40 of 60 computed digits; with symbols, the same at several rational points of
    mixed signs (a false match needs two different expressions that agree at all of them).
    """
    if first == second:
        return True
    if first.is_Rational and second.is_Rational:
        return False
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols:
        return _close(first.evalf(DIGITS), second.evalf(DIGITS)) is True
    agreed = False
    for point in _points(symbols):
        verdict = _close(_at(first, point), _at(second, point))
        if verdict is False:
            return False
        agreed = agreed or verdict is True
    return agreed


def ratio_is_constant(first: sympy.Expr, second: sympy.Expr, *, positive: bool) -> bool:
    """Is first = c * second with one c != 0 (c > 0 where ``positive``)? Decides whether two equations say the same."""
    symbols = sorted(first.free_symbols | second.free_symbols, key=str)
    if not symbols or first.free_symbols != second.free_symbols:
        return False
    quotients = []
    for point in _points(symbols):
        top, bottom = _at(first, point), _at(second, point)
        if _finite(top) and _finite(bottom) and abs(bottom) > AGREE and abs(top) > AGREE:
            quotients.append(top / bottom)
    if len(quotients) < 2 or any(_close(quotient, quotients[0]) is not True for quotient in quotients):
        return False
    return not positive or bool(sympy.re(quotients[0]) > 0)


# Rational points; a symbol takes entry (trial + its index * 3) % 8. The last trial is integers, for what lives on them.
_VALUES = ("37/23", "-41/29", "53/19", "-17/31", "7/43", "-61/13", "5/3", "-9/11")


def _points(symbols: list[sympy.Symbol]) -> list[dict[sympy.Symbol, sympy.Rational]]:
    values = [sympy.Rational(value) for value in _VALUES]
    mixed = [{s: values[(t + 3 * i) % 8] + sympy.Rational(i, 7) for i, s in enumerate(symbols)} for t in range(4)]
    positive = {s: sympy.Rational(29 + 13 * i, 17) for i, s in enumerate(symbols)}
    whole = {s: sympy.Integer(5 + 2 * i) for i, s in enumerate(symbols)}
    return [*mixed, positive, whole]


def _at(expression: sympy.Expr, point: dict[sympy.Symbol, sympy.Rational]) -> sympy.Expr:
    """Its value at a point, to DIGITS."""
    value = expression.evalf(DIGITS, subs=point)  # several times faster than building the expression at the point
    return value if not value.free_symbols else expression.xreplace(point).evalf(DIGITS)


def _close(a: sympy.Expr, b: sympy.Expr) -> bool | None:
    """Equal to AGREE; None where either has no finite value."""
    if not (_finite(a) and _finite(b)):
        return None
    return bool(abs(a - b) <= AGREE * max(abs(a), abs(b), AGREE))


def _finite(value: sympy.Expr) -> bool:
    real, imaginary = value.as_real_imag()
    return bool(real.is_Number and imaginary.is_Number and real.is_finite and imaginary.is_finite)
