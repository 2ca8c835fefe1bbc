"""What share of one accelerator the update and the decode step use, at the shapes of published models. Prints JSON.

    python scripts/bench_accelerator.py [MODEL ...] [--rows 16] [--micro-batch 4] [--length 2048] [--slots 64]

Random weights, bfloat16 (float32 on CPU, where this only shows that it runs). Both shares are of what the device itself
reaches in the same run, not of a data sheet: `mfu`, the model's floating-point operations of an update (three times
those of its forward pass: nothing that is computed again counts, attention counts its causal half, the head the
response alone) per second, of the rate of one large matrix product; `share`, the bytes that a decode step must read
(weights once, the cache up to the window) per second, of the rate at which a large array is copied (read and written).
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from bench_sampler import step_seconds
from bench_update import drawn_work, minibatch_of

from hacrl_jax import learner, models
from hacrl_jax.agent import compute_dtype
from hacrl_jax.config import AgentConfig, MeshConfig, ObjectiveConfig, RolloutConfig
from hacrl_jax.models import DecoderConfig
from hacrl_jax.models.published import published
from hacrl_jax.sampler.engine import Engine
from hacrl_jax.sharding import make_mesh
from hacrl_jax.types import Params

MODELS = ("Qwen/Qwen3-0.6B", "Qwen/Qwen3-1.7B", "Qwen/Qwen3-4B")
REPEAT = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument(
        "model", nargs="*", default=MODELS, help="hub ids of known shape, or folders with a config.json"
    )
    parser.add_argument("--rows", type=int, default=16, help="of an update")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=2048, help="tokens of a row, of which a quarter is the prompt")
    parser.add_argument("--slots", type=int, default=64, help="rows decoded at once")
    parser.add_argument("--size", type=int, default=8192, help="width of the matrices, and 2^-17 of the copied bytes")
    options = parser.parse_args()
    device, dtype = jax.devices()[0], compute_dtype("auto")
    matrix, copy = matrix_rate(options.size, dtype), copy_rate(options.size << 17)
    result: dict[str, Any] = {
        "device": device.device_kind, "dtype": dtype.name, "matrix_tflops": matrix / 1e12, "copy_gb_per_s": copy / 1e9,
    }  # fmt: skip
    for name in options.model:
        config = published(name) or models.read_config(models.resolve(name))
        prompt = options.length // 4
        result[name] = {
            "update": update(config, options.rows, options.micro_batch, prompt, options.length - prompt, dtype, matrix),
            "decode": decode(config, options.slots, prompt, options.length - prompt, dtype, copy),
        }
    print(json.dumps(result, indent=1))


def seconds(function: Callable[[], Any]) -> float:
    """Of one call: the median of REPEAT after a warm-up."""
    found = []
    for _ in range(REPEAT + 1):
        start = time.perf_counter()
        jax.block_until_ready(function())
        found.append(time.perf_counter() - start)
    return statistics.median(found[1:])


def matrix_rate(size: int, dtype: Any, times: int = 10) -> float:
    """Floating-point operations per second of [size, size] products."""
    a = jax.random.normal(jax.random.key(0), (size, size), dtype) / size**0.5
    chain = jax.jit(lambda a, x: jax.lax.fori_loop(0, times, lambda _, x: a @ x, x))
    return times * 2 * size**3 / seconds(lambda: chain(a, a))


def copy_rate(size: int) -> float:
    """Bytes read and written per second by a pass over so many bytes."""
    x = jnp.zeros(size // 4, jnp.float32)
    once = jax.jit(lambda x: x + 1)
    return 2 * x.nbytes / seconds(lambda: once(x))


def forward_flops(config: DecoderConfig, prompt: int, response: int) -> int:
    """Of one row's forward pass, whose response meets the head."""
    d, T = config.hidden_size, prompt + response
    q, kv = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    kernels = d * (2 * q + 2 * kv) + 3 * d * config.intermediate_size
    # Scores and mixture, each 2 T^2 q, of which half is causal.
    return config.num_hidden_layers * (2 * kernels * T + 2 * T**2 * q) + 2 * d * config.vocab_size * response


def update(config: DecoderConfig, rows: int, micro_batch: int, prompt: int, response: int, dtype: Any,
           rate: float) -> dict[str, float]:  # fmt: skip
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    graphdef, _, _ = models.abstract(config)
    agent = AgentConfig(name="a", model="-", micro_batch=micro_batch)
    objective = ObjectiveConfig(cross="none")
    forward = learner.Forward(
        graphdef, config.vocab_size, 1.0, dtype, agent.logprob_chunk, response, agent.remat, agent.attention
    )
    minibatch = minibatch_of(drawn_work(config.vocab_size, prompt, response, rows))
    with jax.set_mesh(mesh):
        programs = learner.build(forward, agent, objective, 0, mesh, total_updates=REPEAT + 1)
        state = programs.init(jax.jit(lambda: models.init(config, jax.random.key(0)))())

        def once() -> Any:
            nonlocal state
            state, outcome = programs.update(state, minibatch, jnp.int32(0))
            return state, outcome.loss

        taken = seconds(once)
    return {"seconds": taken, "mfu": 3 * rows * forward_flops(config, prompt, response) / taken / rate}


def decode(config: DecoderConfig, slots: int, prompt: int, response: int, dtype: Any,
           rate: float) -> dict[str, dict[str, float]]:  # fmt: skip
    """For each window, its step with every slot busy."""
    graphdef, shapes, _ = models.abstract(config)
    settings = RolloutConfig(prompts=slots, samples=1, slots=slots, shrink=0, max_prompt=prompt, max_response=response)
    engine = Engine(
        graphdef, config, shapes, eos=(), vocab_size=config.vocab_size, config=settings, dtype=dtype, lanes=1
    )
    params = jax.jit(lambda: jax.tree.map(lambda x: x.astype(dtype), models.init(config, jax.random.key(0))))()
    copy = engine.load_params(params)
    del params
    entry = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * dtype.itemsize
    return {
        str(window): {
            "milliseconds": 1e3 * taken,
            "share": (_read(config, copy) + slots * window * entry) / taken / rate,
        }
        for (_, window), taken in step_seconds(engine, copy, 1).items()
    }


def _read(config: DecoderConfig, params: Params) -> int:
    """Bytes of the weights that a step reads: an embedding that is not the head gives each slot a row, next to none."""
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    if config.tie_word_embeddings:
        return size
    return size - config.vocab_size * config.hidden_size * jax.tree.leaves(params)[0].dtype.itemsize


if __name__ == "__main__":
    main()
