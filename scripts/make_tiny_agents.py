"""Make the three embedded agents again from nothing: `python scripts/make_tiny_agents.py [--to FOLDER] [--only NAME]`.

Each agent is trained from random values on worked answers to the embedded task, of which only a part is right; the
rest is wrong in consistent ways. RECIPES says how much of what: every agent is good at something that another is bad
at, and no skill is absent anywhere, since reinforcement learning cannot raise what is never sampled. Test problems are
not used.

Everything follows from the seeds below. The last bits of the weights may still differ between kinds of CPU and numbers
of threads, as matrix products sum in another order there; accuracies agree within a point.
"""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tiny_tokenizers
from safetensors.numpy import save
from tiny_tokenizers import write_json

from hacrl_jax import tokenizer
from hacrl_jax.config import ArithmeticConfig, PromptConfig
from hacrl_jax.models import decoder, hf
from hacrl_jax.tasks import arithmetic
from hacrl_jax.types import Problem

AGENTS = Path(__file__).resolve().parent.parent / "hacrl_jax" / "agents"
SKILLS = ("+", "+carry", "-", "-borrow", "-negative", "*", "*carry")


@dataclass(frozen=True)
class Recipe:
    seed: int
    steps: int
    config: dict[str, Any]
    right: tuple[float, ...]  # share of right answers for each of SKILLS
    slip: float  # share of the wrong answers that are slips; the rest is the skill's own systematic error


QWEN = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "vocab_size": 288,  # padded beyond the tokenizer's 270 ids, as Qwen3's is
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "vocab_size": 372,
}


def _shape(hidden: int, intermediate: int, layers: int) -> dict[str, int]:
    # head_dim is not hidden / heads in two of the three, as in Qwen3-0.6B and Qwen3-4B.
    return {
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }


RECIPES = {
    "tiny-qwen3-a": Recipe(1, 1800, QWEN | _shape(64, 192, 4), (0.65, 0.55, 0.45, 0.2, 0.12, 0.4, 0.12), 0.2),
    "tiny-qwen3-b": Recipe(2, 2500, QWEN | _shape(48, 144, 3), (0.3, 0.12, 0.6, 0.5, 0.55, 0.35, 0.25), 0.2),
    "tiny-llama": Recipe(3, 2200, LLAMA | _shape(56, 192, 3), (0.3, 0.12, 0.3, 0.15, 0.12, 0.7, 0.65), 0.2),
}
SYSTEMATIC: dict[str, tuple[arithmetic.Variant, ...]] = {
    "+": ("slip",),
    "+carry": ("no_carry",),
    "-": ("slip",),
    "-borrow": ("no_borrow",),
    "-negative": ("dropped_sign",),
    "*": ("off_by_ten",),
    "*carry": ("no_carry", "off_by_ten"),
}
TRAIN_PROBLEMS = {"+": 8000, "-": 8000, "*": 800}  # about all there are with two digits
BATCH = 64
SHORTEST_PROMPT = 20
PEAK_RATE = 4e-3
SCAN = 50  # training steps per call


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the embedded agents again from nothing.")
    parser.add_argument("--to", type=Path, default=AGENTS, help="folder that gets one folder per agent")
    parser.add_argument("--only", choices=list(RECIPES), help="make one of them")
    arguments = parser.parse_args()
    for name in [arguments.only] if arguments.only else list(RECIPES):
        make(name, arguments.to / name)


def make(name: str, folder: Path) -> None:
    """Train one agent and write its folder."""
    recipe, start = RECIPES[name], time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    write = tiny_tokenizers.write_qwen if recipe.config["model_type"] == "qwen3" else tiny_tokenizers.write_llama
    eos = write(folder)
    ids = {"eos_token_id": eos, "pad_token_id": eos[1]}
    if recipe.config["model_type"] == "llama":
        ids["bos_token_id"] = eos[1] - 1
    write_json(folder / "config.json", recipe.config | ids | {"dtype": "float32", "use_cache": True})
    write_json(folder / "generation_config.json", ids | {"do_sample": True, "temperature": 1.0})
    tok = tokenizer.load(folder, PromptConfig())
    config = hf.read_config(folder)
    rows, weights = dataset(tok, recipe)
    params = train(config, recipe, rows, weights, name)
    (folder / "model.safetensors").write_bytes(save(named(params, config), metadata={"format": "pt"}))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    print(f"{name}: {count} parameters, {time.perf_counter() - start:.0f} s", flush=True)


def dataset(tok: tokenizer.Tokenizer, recipe: Recipe) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Every training problem with every variant of its answer, and how often each is to be drawn.

    Rows are tokens [rows, T] and the length of prompt and of prompt plus response [rows]; weights [rows] sum to 1.
    """
    texts: list[tuple[list[int], list[int]]] = []
    weights: list[float] = []
    for operation in arithmetic.OPERATIONS:
        size = TRAIN_PROBLEMS[operation]
        for problem in arithmetic.problems(ArithmeticConfig(operations=(operation,), size=size), "train"):
            prompt = tokenizer.render(tok, problem)
            for variant, share in mixture(problem, recipe):
                response = [*tokenizer.encode(tok, arithmetic.worked(problem, variant)), tok.eos[0]]
                texts.append((prompt, response))
                weights.append(share / size)
    width = max(len(prompt) + len(response) for prompt, response in texts)
    tokens = np.full((len(texts), width), tok.pad, np.int32)
    for row, (prompt, response) in zip(tokens, texts, strict=True):
        row[: len(prompt) + len(response)] = prompt + response
    prompt_length = np.array([len(prompt) for prompt, _ in texts], np.int32)
    length = prompt_length + np.array([len(response) for _, response in texts], np.int32)
    total = np.array(weights)
    return {"tokens": tokens, "prompt": prompt_length, "length": length}, total / total.sum()


def mixture(problem: Problem, recipe: Recipe) -> list[tuple[arithmetic.Variant, float]]:
    """The variants of a problem's answer with their shares, which sum to 1."""
    skill = arithmetic.skill(problem)
    right = recipe.right[SKILLS.index(skill)]
    wrong = SYSTEMATIC[skill]
    shares = {"right": right, "slip": (1 - right) * recipe.slip}
    for variant in wrong:
        shares[variant] = shares.get(variant, 0.0) + (1 - right) * (1 - recipe.slip) / len(wrong)
    return list(shares.items())


def train(config: decoder.DecoderConfig, recipe: Recipe, rows: Any, weights: np.ndarray, name: str) -> Any:
    """Parameters after recipe.steps updates of AdamW on cross-entropy over the response tokens."""
    graphdef = decoder.abstract(config)[0]
    params = jax.tree_util.tree_map_with_path(_widen, decoder.init(config, jax.random.key(recipe.seed)))
    schedule = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, 100, recipe.steps, 0.02 * PEAK_RATE)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.98, weight_decay=0.01))
    rows = jax.tree.map(jnp.asarray, rows)

    def loss(params: Any, batch: Any) -> jax.Array:
        tokens, width = batch["tokens"], batch["tokens"].shape[1] - 1
        positions = jnp.broadcast_to(jnp.arange(width), (BATCH, width))
        hidden, _ = decoder.apply(graphdef, params, tokens[:, :-1], positions)
        first = SHORTEST_PROMPT - 1  # no logits for positions that are prompt in every row
        logits = decoder.logits(params, hidden[:, first:])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, first + 1 :])
        target = positions[:, first:] + 1
        scored = (target >= batch["prompt"][:, None]) & (target < batch["length"][:, None])
        return jnp.sum(losses * scored) / jnp.sum(scored)

    @partial(jax.jit, donate_argnums=(0, 1))
    def several(params: Any, state: Any, draws: jax.Array) -> Any:
        def step(carry: Any, draw: jax.Array) -> Any:
            params, state = carry
            value, gradient = jax.value_and_grad(loss)(params, jax.tree.map(lambda leaf: leaf[draw], rows))
            updates, state = optimizer.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), value

        (params, state), values = jax.lax.scan(step, (params, state), draws)
        return params, state, values.mean()

    rng, state = np.random.default_rng(recipe.seed), optimizer.init(params)
    for done in range(0, recipe.steps, SCAN):
        draws = rng.choice(len(weights), size=(SCAN, BATCH), p=weights)
        params, state, value = several(params, state, jnp.asarray(draws))
        if done % (10 * SCAN) == 0 or done + SCAN >= recipe.steps:
            print(f"{name}: step {done + SCAN} of {recipe.steps}, loss {float(value):.4f}", flush=True)
    return params


def _widen(path: Any, leaf: jax.Array) -> jax.Array:
    """Deviation 1 / sqrt(inputs) for kernels and 0.1 for the embedding: 0.02 is made for wider models."""
    if path[-1].key == "kernel":
        return leaf / 0.02 * leaf.shape[-2] ** -0.5
    return leaf * 5 if path[-1].key == "embed" else leaf


def named(params: Any, config: decoder.DecoderConfig) -> dict[str, np.ndarray]:
    """Parameters under the names, and in the layout, of transformers."""
    tensors = {}
    for name, ((path, layer), shape) in hf.names(config).items():
        value = reduce(lambda tree, key: tree[key], path, params)
        value = np.asarray(value if layer is None else value[layer])
        tensors[name] = np.ascontiguousarray(value.T if path[-1] == "kernel" else value).reshape(shape)
    return tensors


if __name__ == "__main__":
    main()
