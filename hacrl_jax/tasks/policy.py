"""The switches of verification. docs/verification.md explains each with examples."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Literal


@dataclass(frozen=True)
class Policy:
    """What is a matter of taste."""

    boxes: Literal["last", "all"] = "last"  # all: several boxes count as one list
    percent: Literal["either", "value", "number"] = "either"  # 28% equals 28 and 0.28, only 0.28, or only 28
    units: Literal["known", "ignore", "require"] = "known"  # known: two known units that differ are wrong
    rounding: int = 6  # significant digits from which a decimal may stand for what rounds to it; 0 is never
    tolerance: float = 0.0  # relative, for gold answers written as decimals; 0 is exact

    def to_json(self) -> str:
        return json.dumps(asdict(self))


DEFAULT = Policy()
