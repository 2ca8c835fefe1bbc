"""Seconds of whole RL steps of one agent on fixed work, beside TRL's GRPOTrainer in the same run. Prints JSON.

    python scripts/bench_step.py [--steps 4] [--rounds 2] [--no-trl]

The work is `rl_step` of $HACRL_SHARED/bench/workloads.json (default: ../shared): every prompt is answered so often,
answers get a reward for their length, one update trains on all of them; float32, random weights. Ours is
hacrl_jax.train with preset gspo as a user would call it: rollouts, verification, the journal and the metrics are in it,
the checkpoint at the end is not. TRL's has sequence-level ratios, no KL and the same batch.
Every contestant runs in a process of its own, they take turns by rounds, and the first steps of a process
(compilation, first touch of memory) are left out.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from bench_update import SHARED, write

UNTIMED = 2  # first steps of a process
RATE = 1e-5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=4, help="timed steps of a process")
    parser.add_argument("--rounds", type=int, default=2, help="processes of each contestant")
    parser.add_argument("--no-trl", action="store_true", help="leave TRL out")
    options = parser.parse_args()
    fixed = json.loads((SHARED / "bench" / "workloads.json").read_text("utf-8"))
    work = fixed["rl_step"]
    contestants: dict[str, Callable[..., list[float]]] = {"ours": ours}
    if not options.no_trl and find_spec("trl") and find_spec("torch"):
        contestants["trl"] = trl
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_agent(fixed["models"][work["model"]], work, folder)
        for _ in range(options.rounds):
            for name, run in contestants.items():
                seconds[name] += _alone(run, folder, work, options.steps + UNTIMED)[UNTIMED:]
    median = {name: statistics.median(found) for name, found in seconds.items()}
    result: dict[str, Any] = {"seconds": median["ours"], "steps": seconds["ours"]}
    if "trl" in median:
        ratio = median["trl"] / median["ours"]
        result |= {"trl_seconds": median["trl"], "trl_steps": seconds["trl"], "ratio_trl": ratio}
    result["load"] = os.getloadavg()
    print(json.dumps(result, indent=1))


def write_agent(shape: dict[str, Any], work: dict[str, Any], folder: Path) -> None:
    """The model, a tokenizer with a word for every id, and a file of prompts of the right length."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    (folder / "model").mkdir()
    write(shape, folder / "model")
    words = {"<end>": 0, "<unknown>": 1} | {f"w{i}": i for i in range(2, shape["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unknown>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", unk_token="<unknown>"
    )
    fast.save_pretrained(folder / "model")
    rng = np.random.default_rng(1)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(64 * work["prompts"]):
            ids = rng.integers(2, shape["vocab_size"], work["prompt_length"])
            text = " ".join(f"w{i}" for i in ids)
            file.write(json.dumps({"question": text, "answer": "1", "prompt": text}) + "\n")


def ours(folder: Path, work: dict[str, Any], steps: int) -> list[float]:
    import hacrl_jax
    from hacrl_jax.config import resolve

    summary = hacrl_jax.train(resolve({
        "name": "bench", "runs": str(folder / f"runs-{os.getpid()}"), "preset": "gspo", "steps": steps + 1,
        "minibatch": work["prompts"],
        "agents": [{
            "name": "one", "model": str(folder / "model"), "dtype": "float32", "optimizer": {"lr": RATE},
            "prompt": {"format": "{problem}"},
        }],
        "data": {"source": str(folder / "prompts.jsonl"), "fields": {"question": "question", "answer": "answer"}},
        "rollout": {
            "prompts": work["prompts"], "samples": work["samples"], "max_prompt": work["prompt_length"],
            "max_response": work["new_tokens"],
        },
        # The batch is used once, and neither side spends a forward pass on log-probs before the update.
        "objective": {"kl_coefficient": 0.0, "source_logprob": "sampler"},
        "reward": {"correct": 0.0, "length": {"weight": 1.0, "limit": work["new_tokens"]}},
        "checkpoint": {"every": 0},
        "eval": {"before": False, "after": False},
    }), show=False)  # fmt: skip
    rows = [json.loads(line) for line in (summary.folder / "metrics.jsonl").read_text("utf-8").splitlines()]
    ends = [row["time/wall"] for row in rows if "loss" in row]
    return np.diff(ends).tolist()  # of every step but the first


def trl(folder: Path, work: dict[str, Any], steps: int) -> list[float]:
    import torch
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(os.cpu_count() or 1)
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            ends.append(time.perf_counter())

    batch = work["prompts"] * work["samples"]
    settings = GRPOConfig(
        output_dir=str(folder / f"trl-{os.getpid()}"), max_steps=steps + 1, per_device_train_batch_size=batch,
        num_generations=work["samples"], max_completion_length=work["new_tokens"], learning_rate=RATE, beta=0.0,
        importance_sampling_level="sequence", loss_type="grpo", epsilon=3e-4, epsilon_high=4e-4, temperature=1.0,
        use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1000,
        disable_tqdm=True, generation_kwargs={"min_new_tokens": work["new_tokens"]},
        model_init_kwargs={"dtype": torch.float32},
    )  # fmt: skip
    GRPOTrainer(
        model=str(folder / "model"), args=settings, callbacks=[Clock()],
        reward_funcs=lambda completions, **_: [-float(len(text)) for text in completions],
        train_dataset=load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train"),
    ).train()  # fmt: skip
    return np.diff(ends).tolist()


def _alone(run: Callable[..., list[float]], *arguments: Any) -> list[float]:
    """What run returns, from a process of its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(run, arguments)


if __name__ == "__main__":
    main()
