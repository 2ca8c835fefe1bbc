"""One spelling for LaTeX that means the same: Unicode, spacing, fonts, missing braces, synonyms. Pure text, linear."""

from __future__ import annotations

import re
import unicodedata

UNICODE = {
    "−": "-", "–": "-", "—": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "∙": r"\cdot ", "÷": "/", "∕": "/",
    "°": r"^{\circ}", "º": r"^{\circ}", "π": r"\pi ", "∞": r"\infty ", "√": r"\sqrt ", "≤": r"\le ", "≥": r"\ge ",
    "≠": r"\ne ", "≈": r"\approx ", "∪": r"\cup ", "∩": r"\cap ", "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ",
    "∅": r"\emptyset ", "∖": r"\setminus ", "½": r"\frac{1}{2}", "⅓": r"\frac{1}{3}", "⅔": r"\frac{2}{3}",
    "¼": r"\frac{1}{4}", "¾": r"\frac{3}{4}", "⅕": r"\frac{1}{5}", "⅙": r"\frac{1}{6}", "⅛": r"\frac{1}{8}",
    "²": "^{2}", "³": "^{3}", "⁴": "^{4}", "⁵": "^{5}", "⁶": "^{6}", "⁷": "^{7}", "⁸": "^{8}", "⁹": "^{9}", "⁰": "^{0}",
    "¹": "^{1}", "⁻": "^{-}", "ⁿ": "^{n}", "α": r"\alpha ", "β": r"\beta ", "γ": r"\gamma ", "δ": r"\delta ",
    "ε": r"\epsilon ", "θ": r"\theta ", "λ": r"\lambda ", "μ": r"\mu ", "φ": r"\phi ", "ω": r"\omega ",
    "’": "'", "‘": "'", "′": "'", "“": '"', "”": '"', "⟨": r"\langle ", "⟩": r"\rangle ", "ℝ": r"\mathbb{R}",
}  # fmt: skip
INVISIBLE = dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad"), None)

SYNONYMS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "dbinom": "binom", "tbinom": "binom", "leq": "le", "geq": "ge",
    "leqslant": "le", "geqslant": "ge", "leqq": "le", "geqq": "ge", "lt": "<", "gt": ">", "neq": "ne", "lbrace": r"\{",
    "rbrace": r"\}", "lbrack": "[", "rbrack": "]", "lparen": "(", "rparen": ")", "varnothing": "emptyset",
    "degree": r"^{\circ}", "ast": "*", "div": "/", "colon": ":", "vert": "|", "lvert": "|", "rvert": "|", "mid": "|",
    "backslash": "setminus", "simeq": "approx", "land": r"\text{and}", "lor": r"\text{or}", "cdotp": "cdot",
    "hbox": "text", "mbox": "text", "textrm": "text", "textnormal": "text", "textbf": "text", "textit": "text",
    "textsf": "text", "texttt": "text", "emph": "text", "mathrm": "text", "mathsf": "text", "mathtt": "text",
    "mathbf": "", "mathit": "", "mathnormal": "", "boldsymbol": "", "bm": "", "pmb": "", "ensuremath": "", "boxed": "",
    "fbox": "", "displaystyle": "", "textstyle": "", "scriptstyle": "", "limits": "", "nolimits": "", "left": "",
    "right": "", "big": "", "Big": "", "bigg": "", "Bigg": "", "bigl": "", "bigr": "", "Bigl": "", "Bigr": "",
    "biggl": "", "biggr": "", "Biggl": "", "Biggr": "", "mleft": "", "mright": "", "middle": "", "rm": "", "bf": "",
    "it": "", "quad": " ", "qquad": " ", "enspace": " ", "thinspace": " ", "space": " ", "hspace": " ", "phantom": " ",
    "varepsilon": "epsilon", "varphi": "phi", "vartheta": "theta", "to": "rightarrow", "iff": "Leftrightarrow",
}  # fmt: skip

FUNCTIONS = (
    "arcsin|arccos|arctan|sqrt|sinh|cosh|tanh|sin|cos|tan|cot|sec|csc|log|ln|exp|pi|infinity|infty|theta|alpha|beta"
)
TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\.|.", re.DOTALL)
PLAIN_FUNCTION = re.compile(rf"(?<![\\A-Za-z])(?:np\.|math\.)?({FUNCTIONS})(?![A-Za-z])")
ONE_GROUP = {r"\sqrt", "^", "_"}
TWO_GROUPS = {r"\frac", r"\binom"}


def normalize(text: str) -> str:
    """The same answer in one spelling: ASCII LaTeX, every macro argument braced, no fonts, sizes or math dollars."""
    text = text.translate(INVISIBLE)
    text = "".join(UNICODE.get(letter, letter) for letter in text)
    text = unicodedata.normalize("NFKC", text)
    text = re.sub(r"\\(?:left|right)\s*\.", "", text)  # an invisible delimiter
    text = re.sub(r"(?<=\d)\s*,\s*\\!\s*(?=\d)|(?<=\d)\{,\}(?=\d)", "", text)  # 10,\!080 and 10{,}080
    text = re.sub(r"(?<=\d)(?:\\[,;:! ]|~)(?=\d{3}(?!\d))", "", text)  # 10\,080
    text = re.sub(r"\\(?:begin|end)\{(?:aligned|align\*?|gathered|split|equation\*?)\}", "", text)
    if r"\begin" not in text:
        text = re.sub(r"(?<!\\)&", "", text)
    pieces = [_spelled(token) for token in TOKEN.findall(text)]
    text = "".join(pieces)
    text = re.sub(r"\\begin\{(?:matrix|pmatrix|bmatrix|array|smallmatrix)\}(?:\{[clr|]+\})?", r"\\begin{matrix}", text)
    text = re.sub(r"\\end\{(?:matrix|pmatrix|bmatrix|array|smallmatrix)\}", r"\\end{matrix}", text)
    if r"\text" not in text:
        text = PLAIN_FUNCTION.sub(lambda match: "\\" + match[1].replace("infinity", "infty") + " ", text)
    text = re.sub(r"(?<=\d)\.(?=\s*[/*^)}])", "", text)  # -1./3
    text = re.sub(r"\s+", " ", braced(text)).strip()
    text = re.sub(r"\\frac\{(\\text\{[^{}]*)\}\}\{\\text\{([^{}]*)\}\}", r"\1/\2}", text)  # \frac{\text{m}}{\text{s}}
    return text.replace(" ", "") if re.fullmatch(r"[+-]?\$?\d{1,3}( \d{3})+", text) else text


def squeezed(text: str) -> str:
    """Without spaces, but for those between two digits: `4 2` is not 42."""
    return re.sub(r"(?<!\d)\s+|\s+(?!\d)", "", text)


def _spelled(token: str) -> str:
    if len(token) == 1:
        return {"~": " ", "$": "", "\n": " ", "\t": " "}.get(token, token)
    if not token[1].isalpha():  # control symbols: spaces vanish, \$ and \% lose the backslash that LaTeX needs
        return {r"\!": "", r"\,": " ", r"\;": " ", r"\:": " ", r"\>": " ", "\\ ": " ", r"\$": "$", r"\%": "%"}.get(
            token, token
        )
    new = SYNONYMS.get(token[1:])
    if new is None:
        return token
    return "\\" + new if new[:1].isalpha() else new


def braced(text: str) -> str:
    """\\frac12, \\frac 5{9}, \\sqrt3, x^2 and a_i with braces around every argument; `\\sqrt(2)` and `x^(2)` too."""
    return "".join(_groups(TOKEN.findall(text), 0)[0])


def _groups(tokens: list[str], index: int) -> tuple[list[str], int]:
    out: list[str] = []
    while index < len(tokens):
        token = tokens[index]
        index += 1
        out.append(token)
        for _ in range(2 if token in TWO_GROUPS else token in ONE_GROUP):
            index = _skip_spaces(tokens, index)
            if token == r"\sqrt" and index < len(tokens) and tokens[index] == "[":
                end = _closing(tokens, index)
                out.append("".join(tokens[index : end + 1]))
                index = _skip_spaces(tokens, end + 1)
            argument, index = _argument(tokens, index, parens=token not in TWO_GROUPS)
            out.append(argument)
    return out, index


def _argument(tokens: list[str], index: int, *, parens: bool) -> tuple[str, int]:
    """The macro argument at ``index`` in braces, its own macros braced as well, and the index after it."""
    if index >= len(tokens):
        return "", index
    if tokens[index] == "{" or (parens and tokens[index] == "("):
        end = _closing(tokens, index)
        inner, _ = _groups(tokens[index + 1 : end], 0)
        return "{" + "".join(inner) + "}", end + 1
    if tokens[index] in TWO_GROUPS or tokens[index] in (r"\sqrt", r"\text"):  # \sqrt\frac12
        count = 2 if tokens[index] in TWO_GROUPS else 1
        parts, after = [tokens[index]], index + 1
        for _ in range(count):
            part, after = _argument(tokens, _skip_spaces(tokens, after), parens=False)
            parts.append(part)
        return "{" + "".join(parts) + "}", after
    return "{" + tokens[index] + "}", index + 1


def _skip_spaces(tokens: list[str], index: int) -> int:
    while index < len(tokens) and tokens[index].isspace():
        index += 1
    return index


def _closing(tokens: list[str], index: int) -> int:
    """The index of the token that closes the bracket at ``index``; the last token where nothing does."""
    pairs = {"{": "}", "(": ")", "[": "]"}
    opening, closing, depth = tokens[index], pairs[tokens[index]], 0
    for position in range(index, len(tokens)):
        depth += (tokens[position] == opening) - (tokens[position] == closing)
        if depth == 0:
            return position
    return len(tokens) - 1
