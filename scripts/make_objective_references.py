"""Write tests/references/objective.json: random minibatches and what tests/torch_objective.py makes of them.

python scripts/make_objective_references.py needs PyTorch; the tests that read the file do not.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

TESTS = Path(__file__).parent.parent / "tests"
sys.path.insert(0, str(TESTS))

import torch_objective  # noqa: E402
from objective_cases import all_cases  # noqa: E402


def rounded(value: object) -> object:
    if isinstance(value, list):
        return [rounded(item) for item in value]
    return round(value, 12) if isinstance(value, float) else value


def main() -> None:
    references = {}
    for name, case in all_cases().items():
        inputs = {key: rounded(value) for key, value in case.items() if key != "settings"}
        inputs["settings"] = case["settings"]  # exact: 3e-4 is no number to round
        expect = {key: rounded(value) for key, value in torch_objective.evaluate(inputs).items()}
        references[name] = {"case": inputs, "expect": expect}
    path = TESTS / "references" / "objective.json"
    path.parent.mkdir(exist_ok=True)
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(value)}" for name, value in references.items())
    path.write_text(f"{{\n{lines}\n}}\n")
    print(f"{path}: {len(references)} cases, {path.stat().st_size // 1024} KiB")


if __name__ == "__main__":
    main()
