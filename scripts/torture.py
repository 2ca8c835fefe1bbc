"""Kill a training run again and again, and hold what it leaves behind against a run that was never touched.

    python scripts/torture.py --kills 20 --seed 0

Two small agents with different tokenizers, one of them with low-rank updates, go three times through shuffled data that
the batch does not divide. The victim is killed (SIGKILL, now and then SIGTERM) at random moments: after a random time,
inside a phase of a random step, or while a checkpoint is being written; each time it continues with --resume. At the
end its metrics (times aside), rollouts and last checkpoint, array by array, must be those of the untouched run to the
last bit. Ends with status 1 if anything differs.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
AGENTS = ROOT / "hacrl_jax" / "agents"
CONFIG: dict[str, Any] = {
    "epochs": 3,  # of 18 problems, 4 a step: 14 steps
    "minibatch": 2,
    "agents": [
        {"name": "qwen", "model": str(AGENTS / "tiny-qwen3-b"), "optimizer": {"lr": 1e-3}},
        {"name": "llama", "model": str(AGENTS / "tiny-llama"), "optimizer": {"lr": 1e-3}, "lora": {"rank": 4}},
    ],
    "data": {"source": "arithmetic", "arithmetic": {"digits": 1, "size": 18}},
    "rollout": {"prompts": 4, "samples": 4, "max_prompt": 40, "max_response": 40},
    "objective": {"eps_low": 0.02, "eps_high": 0.02, "delta": 0.5},
    "eval": {
        "before": False, "every": 5,
        "sets": [{"data": {"source": "arithmetic", "split": "test", "limit": 4}, "samples": 1, "temperature": 1.0}],
    },
    "verifier": {"workers": 1},
    "checkpoint": {"every": 2},
    "journal": {"keep_tensors": 0},
}  # fmt: skip
PHASES = ("generate", "score", "verify", "exchange", "update", "save")
STATUS = {"KILL": -signal.SIGKILL, "TERM": 75}
Moment = dict[str, Any]  # signal; phase and its number of occurrences before, or none; seconds from there


def child(folder: Path, resume: bool, moment: Moment) -> None:
    """Train in this process, which ends itself at the moment. The phase in hand is kept in folder/where."""
    from hacrl_jax import checkpoint, journal
    from hacrl_jax.algorithm import train
    from hacrl_jax.config import resolve
    from hacrl_jax.types import UserError

    where = os.open(folder / "where", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    left = moment.get("after", 0)
    number = getattr(signal, f"SIG{moment['signal']}", None) if moment else None

    def strike() -> None:
        time.sleep(moment["seconds"])
        os.kill(os.getpid(), number)

    def entered(phase: str, step: int, agent: str) -> None:
        nonlocal left, number
        os.pwrite(where, f"step {step} {phase} {agent}".ljust(60).encode(), 0)
        if number is not None and moment.get("phase") in (None, f"{phase} {agent}".strip(), phase):
            if left == 0:
                threading.Thread(target=strike, daemon=True).start()
            left -= 1

    timed, save = journal.Page.timed, checkpoint.Store.save

    @functools.wraps(timed)
    def watched(page: Any, phase: str, agent: Any, *rest: Any) -> Any:
        entered(phase, page.step, agent.name if agent else "")
        return timed(page, phase, agent, *rest)

    def saved(store: Any, step: int, *rest: Any) -> None:
        entered("save", step, "")
        save(store, step, *rest)

    journal.Page.timed, checkpoint.Store.save = watched, saved
    settings = json.loads((folder / "config.json").read_text())
    try:
        train(resolve(settings), resume=resume, show=False)
    except UserError as error:  # as the command line does
        print(error)
        sys.exit(getattr(error, "status", 2))


def run(folder: Path, resume: bool = False, moment: Moment | None = None) -> tuple[int, float, str]:
    """(exit status, seconds, last words) of one training process."""
    cache = folder.parent / "cache"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]), "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "", "JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }  # fmt: skip
    arguments = ["child", str(folder), str(int(resume)), json.dumps(moment or {})]
    begin = time.monotonic()
    # The log goes to a file: the verifier's workers outlive a killed parent by a moment and would hold a pipe open.
    with (folder / "log").open("w+b") as log:
        done = subprocess.run(
            [sys.executable, __file__, *arguments], env=environment, cwd=ROOT, stdout=log, stderr=log, check=False
        )
        log.seek(0)
        words = log.read().decode(errors="replace")
    return done.returncode, time.monotonic() - begin, words


def prepare(work: Path, name: str) -> Path:
    folder = work / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "name": "run", "runs": str(folder)}))
    return folder


def untouched(work: Path) -> Path:
    """The folder of a finished run."""
    folder = work / "untouched"
    if (folder / "run" / "checkpoints" / "step_14").is_dir():  # of an earlier call with this --work
        return folder
    status, seconds, words = run(prepare(work, "untouched"))
    if status:
        raise SystemExit(f"the untouched run ended with status {status}:\n{words}")
    print(f"untouched: {seconds:.0f} s", flush=True)
    return folder


def torture(work: Path, moments: list[Moment]) -> Path:
    """The folder of a run that was ended at every moment, then left alone."""
    folder, ends = prepare(work, "victim"), Counter()
    for number, moment in enumerate([*moments, None], start=1):
        status, seconds, words = run(folder, resume=number > 1, moment=moment)
        place = (folder / "where").read_text().strip()
        expected = (0, STATUS[moment["signal"]]) if moment else (0,)  # 0: the run was over before its moment came
        how = f"SIG{moment['signal']}" if moment and status else "finished"
        print(f"{number}: {how} at {place or 'the start'}, status {status}, {seconds:.0f} s", flush=True)
        ends.update([f"{how} in {place.split()[2] if place else 'start'}"] if moment and status else [])
        if status not in expected:
            raise SystemExit(f"status {status} instead of {expected}:\n{words}")
        if status == 0 and moment:
            print("the run is over; the other moments come too late", flush=True)
            break
    print(f"{ends.total()} ends: " + ", ".join(f"{count} {end}" for end, count in sorted(ends.items())), flush=True)
    return folder


def differences(one: Path, other: Path) -> list[str]:
    """What differs between two run folders, one line each; times may."""
    found = []
    rows = [[_timeless(json.loads(line)) for line in (run / "metrics.jsonl").open()] for run in (one, other)]
    if len(rows[0]) != len(rows[1]):
        found.append(f"metrics.jsonl: {len(rows[0])} and {len(rows[1])} rows")
    for a, b in zip(*rows, strict=False):
        if a != b:
            found.append(f"metrics of step {a['step']}: {[key for key in a | b if a.get(key) != b.get(key)]}")
    names = [sorted(file.name for file in (run / "rollouts").iterdir()) for run in (one, other)]
    if names[0] != names[1]:
        found.append(f"rollouts: {sorted(set(names[0]) ^ set(names[1]))}")
    for name in set(names[0]) & set(names[1]):
        if (one / "rollouts" / name).read_bytes() != (other / "rollouts" / name).read_bytes():
            found.append(f"rollouts/{name}")
    a, b = (_last_record(run) for run in (one, other))
    found += [f"last checkpoint: {key}" for key in a | b if a.get(key) != b.get(key) and key != "config"]
    return found or [f"last checkpoint: {name}" for name in _arrays(one, other, a)]


def _arrays(one: Path, other: Path, record: dict[str, Any]) -> list[str]:
    """Names of the arrays (parameters, moments, counters) of two last checkpoints that are not equal bit by bit."""
    import jax
    import numpy as np

    from hacrl_jax import checkpoint

    found = []
    for agent, facts in record["agents"].items():
        for key, (*shape, dtype) in facts.get("arrays", {}).items():
            like = jax.ShapeDtypeStruct(shape, dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0]))
            a, b = (
                np.asarray(checkpoint.load_array(f"{run}/checkpoints/{record['folder']}", agent, key, like))
                for run in (one, other)
            )
            if a.tobytes() != b.tobytes():
                found.append(f"{agent}, {key}")
    return found


def compared(run: Path) -> str:
    """How much ``differences`` holds against each other."""
    agents = _last_record(run)["agents"]
    rows = sum(1 for _ in (run / "metrics.jsonl").open())
    arrays = ", ".join(f"{len(facts['arrays'])} arrays of {name}" for name, facts in agents.items())
    return f"{rows} metrics rows, {len(list((run / 'rollouts').iterdir()))} files of rollouts, {arrays}"


def _last_record(run: Path) -> dict[str, Any]:
    """The record of the newest checkpoint; its fingerprints stand for parameters, moments and counters."""
    last = max((run / "checkpoints").glob("step_*"), key=lambda path: int(path.name[5:]))
    return {"folder": last.name, **json.loads((last / "record" / "metadata").read_text())}


def _timeless(row: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in row.items() if not key.startswith("time/") and key != "tokens_per_second"}


def random_moments(count: int, seed: int, span: float) -> list[Moment]:
    """span: seconds of about one step."""
    dice = random.Random(seed)
    moments = []
    for _ in range(count):
        kind = "TERM" if dice.random() < 0.15 else "KILL"
        if dice.random() < 0.4:
            moments.append({"signal": kind, "seconds": dice.uniform(0, 2 * span)})
        else:
            phase = dice.choice(PHASES)
            after = 0 if phase == "save" else dice.randrange(4)
            moments.append({"signal": kind, "phase": phase, "after": after, "seconds": dice.uniform(0, span / 8)})
    return moments


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--work", type=Path, help="a folder that stays; default: a temporary one")
    arguments = parser.parse_args()
    begin = time.monotonic()
    work = arguments.work or Path(tempfile.mkdtemp(prefix="torture-"))
    whole = untouched(work) / "run"
    clocks = [json.loads(line)["time/wall"] for line in (whole / "metrics.jsonl").open()]
    span = (clocks[-1] - clocks[2]) / 13  # from the second of 14 steps on: the first compiles
    victim = torture(work, random_moments(arguments.kills, arguments.seed, span)) / "run"
    found = differences(whole, victim)
    print("\n".join(found) or f"equal to the last bit: {compared(whole)}")
    print(f"{time.monotonic() - begin:.0f} s in all")
    if not arguments.work:
        shutil.rmtree(work)
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["child"]:
        child(Path(sys.argv[2]), bool(int(sys.argv[3])), json.loads(sys.argv[4]))
    else:
        main()
