"""Is what a finished run left behind whole, and did its agents learn?  python scripts/check_run.py RUN... [--gain 0.05]

Prints one line per run; ends with status 1 and one line per fault if anything is missing. --gain is the least mean
gain of held-out accuracy over the agents and measures of a run.
"""

import argparse
import math
import sys
from pathlib import Path

from hacrl_jax import metrics, report
from hacrl_jax.types import UserError

FINITE = ("reward", "capability", "ratio/own/mean", "grad_norm", "response_length", "tokens_per_second")


def faults(folder: Path, gain: float) -> list[str]:
    """What is wrong with a run folder, one line each."""
    run = report.load(folder)
    found = [
        f"{name} is missing" for name in ("report.html", "checkpoints", "tensorboard") if not (folder / name).exists()
    ]
    steps = max((row["step"] for row in run.rows), default=0)
    if run.config["steps"] and steps != run.config["steps"]:
        found.append(f"ended at step {steps} of {run.config['steps']}")
    for agent in run.agents:
        for key in FINITE:
            seen, values = run.series(agent, key)
            if seen != list(range(1, steps + 1)) or not all(map(math.isfinite, values)):
                found.append(f"{agent}: {key} has {len(seen)} finite values in {steps} steps")
    for step in range(1, steps + 1):
        rows = metrics.read(folder / "rollouts" / f"step_{step:06d}.jsonl")
        expected = len(run.agents) * run.config["rollout"]["prompts"] * run.config["rollout"]["samples"]
        if len(rows) != expected:
            found.append(f"step {step} has {len(rows)} rollouts of {expected}")
    lines = report.lines([run])
    gains = [line.gain for line in lines if line.gain is not None]
    if len(gains) < len(lines) or not {line.agent for line in lines} >= set(run.agents):
        found.append("an evaluation before or after training is missing")
    elif sum(gains) / len(gains) < gain:
        found.append(f"mean gain {sum(gains) / len(gains):+.3f} of held-out accuracy is below {gain:+.3f}")
    print(f"{folder}: {steps} steps, gains " + " ".join(f"{line.agent} {line.gain or 0:+.3f}" for line in lines))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--gain", type=float, default=-1.0)
    settings = parser.parse_args()
    try:
        found = [f"{run}: {fault}" for run in settings.runs for fault in faults(run, settings.gain)]
    except UserError as error:
        found = [str(error)]
    for fault in found:
        print(f"error: {fault}", file=sys.stderr)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
