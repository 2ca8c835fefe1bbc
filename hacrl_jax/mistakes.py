"""What pydantic found wrong with a config, in words for the person who wrote it."""

from __future__ import annotations

import difflib
from typing import Any

from pydantic import BaseModel


def explain(detail: dict[str, Any], root: type[BaseModel]) -> str:
    """One line on one of a ValidationError's details: which key, what was expected, the nearest right name."""
    location = [str(part) for part in detail["loc"]]
    key = ".".join(location)
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(location[-1], _fields(location[:-1], root), n=1, cutoff=0.5)
        return f"unknown key {key}" + (f"; did you mean {near[0]}?" if near else "")
    if detail["type"] == "missing":
        return f"{key} is missing"
    message = detail["msg"].removeprefix("Value error, ")
    given = detail.get("input")
    shown = f", got {given!r} ({type(given).__name__})" if location and not isinstance(given, (dict, BaseModel)) else ""
    return f"{key}: {message}{shown}" if key else message


def _fields(location: list[str], root: type[BaseModel]) -> list[str]:
    """Names of the fields of the model at a location such as ['agents', '0', 'optimizer']."""
    model: Any = root
    for part in location:
        if part.isdigit():
            continue
        annotation = model.model_fields[part].annotation
        candidates = [annotation, *getattr(annotation, "__args__", ())]
        for candidate in list(candidates):
            candidates += getattr(candidate, "__args__", ())
        model = next(item for item in candidates if isinstance(item, type) and issubclass(item, BaseModel))
    return list(model.model_fields)
