"""Units of measure at the end (or a currency sign at the start) of an answer, and when two of them are the same."""

from __future__ import annotations

import re

_NAMES = {
    "m": "m metre metres meter meters", "cm": "cm centimetre centimetres centimeter centimeters",
    "mm": "mm millimetre millimetres millimeter millimeters", "km": "km kilometre kilometres kilometer kilometers",
    "in": "in inch inches", "ft": "ft foot feet", "yd": "yd yard yards", "mi": "mi mile miles",
    "g": "g gram grams", "kg": "kg kilogram kilograms", "mg": "mg milligram milligrams", "lb": "lb lbs pound pounds",
    "oz": "oz ounce ounces", "s": "s sec secs second seconds", "min": "min mins minute minutes",
    "h": "h hr hrs hour hours", "day": "day days", "week": "week weeks", "month": "month months",
    "year": "yr yrs year years", "l": "L l litre litres liter liters", "ml": "mL ml millilitre milliliters",
    "dollar": "$ dollar dollars usd", "cent": "cent cents", "euro": "€ euro euros", "deg": "deg degree degrees",
    "rad": "rad radian radians", "mph": "mph", "kph": "kph kmh", "square": "sq square", "cubic": "cu cubic",
    "per": "per /", "unit": "unit units",
}  # fmt: skip
CANONICAL = {name: canonical for canonical, names in _NAMES.items() for name in names.split()}
# Longer names first; a bare single letter is a variable unless a space separates it from the number.
_BARE = sorted((name for name in CANONICAL if name.isalpha()), key=len, reverse=True)
_NOT_UNITS = re.compile(r"\b(?:if|when|where|for|and|or|otherwise|mod|else|base|such|not)\b", re.IGNORECASE)

_GROUP = r"\\text\{[^{}]*\}"
_TAIL = re.compile(
    rf"(?:[\s/*.]|\\cdot|\\times|\^\{{-?\d\}}|{_GROUP}|\\mu|\\AA)*{_GROUP}(?:[\s/*.]|\^\{{-?\d\}}|{_GROUP})*$"
)
_WORDS = re.compile(r"(?P<gap>\s*)(?P<unit>[A-Za-z]+(?:[ /]+[A-Za-z]+){0,4}(?:\^\{-?\d\})?)$")
_DEGREES = re.compile(r"\s*\{?\s*\^\{\\circ\s*\}\s*\}?(?:\\text\{\s*[CFK]\s*\}|[CF](?![A-Za-z]))?$")


def split_unit(text: str) -> tuple[str, str]:
    """(answer without its unit, the unit's text or ""). Text whose whole is a unit keeps it."""
    if text.startswith("$") or text.startswith(("€", "£", "¥")):
        return text[1:].strip(), "$" if text[0] == "$" else text[0]
    if text.startswith("-$"):
        return "-" + text[2:].strip(), "$"
    for unit_pattern in (_DEGREES, _TAIL):
        match = unit_pattern.search(text)
        if match and text[: match.start()].strip():
            unit = re.sub(r"\\text\{([^{}]*)\}", r" \1 ", match.group()).strip()
            if _NOT_UNITS.search(unit):
                return text, ""
            return text[: match.start()].strip(), "degrees" if unit_pattern is _DEGREES else unit
    match = _WORDS.search(text)
    if match and re.search(r"[\d}]$", text[: match.start()]) and _is_bare_unit(match):
        return text[: match.start()].strip(), match["unit"]
    return text, ""


def _is_bare_unit(match: re.Match[str]) -> bool:
    """Letters after a number without \\text: `12 clips`, `5cm`, `3 m`, but not `6m`, `4ab` or `2 RC`."""
    words = re.findall(r"[A-Za-z]+", match["unit"])
    if _NOT_UNITS.search(match["unit"]):
        return False
    if all(len(word) > 1 and word in CANONICAL for word in words):
        return True
    return bool(match["gap"]) and all(word in CANONICAL or (len(word) >= 4 and word.islower()) for word in words)


def known(unit: str) -> str | None:
    """The canonical spelling of a unit made of known names only, else None: `inches^{2}` -> `in^2`."""
    unit = unit.replace("{", "").replace("}", "").replace("\\cdot", " ")
    words = re.findall(r"[A-Za-z]+|[$€/]|\^-?\d", unit)
    if "".join(words) != re.sub(r"[\s.*]", "", unit):
        return None
    names = [word if word[0] == "^" else CANONICAL.get(word, CANONICAL.get(word.lower())) for word in words]
    if not names or None in names:
        return None
    if names[0] in ("square", "cubic"):  # `square feet` -> `ft^2`
        names = [*names[1:], "^2" if names[0] == "square" else "^3"]
    return " ".join(name for name in names if name)
