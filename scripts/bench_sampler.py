"""Useful tokens per second of the sampler on fixed work, beside transformers' `generate` in the same run. Prints JSON.

    python scripts/bench_sampler.py [--repeat 3] [--no-torch]

The work is sample_uniform and sample_ragged of $HACRL_SHARED/bench/workloads.json (default: ../shared). Ragged rows end
at lengths that the scheduler does not know: an array on the device ends them. `bound` is what the decode steps alone
would give with all slots busy; `schedule` is the sum of the step times, each at its own window, that the schedule needs
if a freed slot is refilled at once, with the prefills and insertions it needs. The runs of all contestants alternate,
and medians are compared, because other work on the machine changes its speed from minute to minute.
"""

from __future__ import annotations

import argparse
import heapq
import json
import logging
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hacrl_jax.config import RolloutConfig
from hacrl_jax.models import decoder
from hacrl_jax.models.decoder import DecoderConfig
from hacrl_jax.sampler.engine import Engine
from hacrl_jax.sampler.rollout import rollout
from hacrl_jax.sampler.sampling import sampling
from hacrl_jax.types import Params

SHARED = Path(os.environ.get("HACRL_SHARED", Path(__file__).parent.parent.parent / "shared"))
RAGGED_SLOTS = 16  # rows in flight, as many as the peers' continuous batching had


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeat", type=int, default=3, help="timed runs of each contestant")
    parser.add_argument("--no-torch", action="store_true", help="leave transformers out")
    options = parser.parse_args()
    work = json.loads((SHARED / "bench" / "workloads.json").read_text("utf-8"))
    uniform, ragged = work["sample_uniform"], work["sample_ragged"]
    model = work["models"][uniform["model"]]
    prompts = np.random.default_rng(1).integers(1, model["vocab_size"], (uniform["prompts"], uniform["prompt_length"]))
    limits = np.asarray(ragged["new_tokens_per_prompt"])
    config, params = _model(model)
    ours = {
        "uniform": _made(config, params, len(prompts), uniform["new_tokens"], len(prompts)),
        "ragged": _made(config, params, len(prompts), int(limits.max()), RAGGED_SLOTS),
    }
    contestants: dict[str, Callable[[], Any]] = {
        "uniform": lambda: _ours(ours["uniform"], prompts, None),
        "ragged": lambda: _ours(ours["ragged"], prompts, limits),
    }
    if not options.no_torch:
        contestants |= _transformers(model, prompts, uniform["new_tokens"], limits)
    seconds = _alternate(contestants, options.repeat)
    result = {
        "uniform": _report(seconds, "uniform", prompts.shape[0] * uniform["new_tokens"]),
        "ragged": _report(seconds, "ragged", int(limits.sum())),
    }
    full = _step_seconds(*ours["uniform"], prompts, ours["uniform"][0].windows)
    bound = _schedule([uniform["new_tokens"]] * len(prompts), len(prompts), prompts.shape[1], full)
    result["uniform"] |= {"bound_seconds": bound, "ratio_bound": bound / result["uniform"]["seconds"]}
    steps = _step_seconds(*ours["ragged"], prompts, ours["ragged"][0].windows)
    decode = _schedule(limits.tolist(), RAGGED_SLOTS, prompts.shape[1], steps)
    fixed = _prefill_seconds(*ours["ragged"], prompts)
    busy = sum(limits) / RAGGED_SLOTS * statistics.mean(steps.values())
    result["ragged"] |= {
        "bound_seconds": float(busy),
        "ratio_bound": float(busy) / result["ragged"]["seconds"],
        "schedule_decode_seconds": decode,
        "schedule_seconds": decode + fixed,
        "wall_over_schedule": result["ragged"]["seconds"] / (decode + fixed),
    }
    result["step_milliseconds"] = {
        name: {str(window): 1e3 * value for window, value in found.items()}
        for name, found in (("uniform", full), ("ragged", steps))
    }
    result["prefill_milliseconds"] = 1e3 * fixed
    result["load"] = os.getloadavg()
    print(json.dumps(result, indent=1))


def _model(shape: dict[str, Any]) -> tuple[DecoderConfig, Params]:
    config = DecoderConfig(
        "Qwen3ForCausalLM", shape["vocab_size"], shape["hidden_size"], shape["intermediate_size"],
        shape["num_hidden_layers"], shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"], 1e-6,
        shape["rope_theta"], None, shape["tie_word_embeddings"], True, 32768,
    )  # fmt: skip
    return config, decoder.init(config, jax.random.key(0))


def _made(config: DecoderConfig, params: Params, rows: int, response: int, slots: int) -> tuple[Engine, Params]:
    graphdef, shapes, _ = decoder.abstract(config)
    settings = RolloutConfig(prompts=rows, samples=1, max_prompt=64, max_response=response, slots=slots)
    engine = Engine(graphdef, config, shapes, eos=(), vocab_size=config.vocab_size, config=settings)
    copy = engine.load_params(params)
    for _ in engine.warm_up(copy):
        pass
    return engine, copy


def _ours(made: tuple[Engine, Params], prompts: np.ndarray, limit: np.ndarray | None) -> None:
    rows, length = prompts.shape
    found = rollout(*made, prompts, np.full(rows, length), np.arange(rows), jax.random.key(0), samples=1, limit=limit)
    jax.block_until_ready(found)


def _alternate(contestants: dict[str, Callable[[], Any]], repeat: int) -> dict[str, list[float]]:
    """Seconds of each run; the first round is a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(repeat + 1):
        for name, run in contestants.items():
            start = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - start)
    return {name: found[1:] for name, found in seconds.items()}


def _report(seconds: dict[str, list[float]], name: str, tokens: int) -> dict[str, Any]:
    median = {key: statistics.median(found) for key, found in seconds.items()}
    row: dict[str, Any] = {
        "tokens": tokens,
        "seconds": median[name],
        "runs": seconds[name],
        "tokens_per_second": tokens / median[name],
    }
    for key in median:
        if key.startswith(f"{name}_"):
            other = key.removeprefix(f"{name}_")
            row |= {f"{other}_tokens_per_second": tokens / median[key], f"ratio_{other}": median[key] / median[name]}
    return row


def _step_seconds(engine: Engine, params: Params, prompts: np.ndarray, windows: tuple[int, ...]) -> dict[int, float]:
    """Seconds of one decode step with all slots busy, for each window."""
    settings, steps, found = sampling(1.0), engine.config.dispatch_steps, {}
    key = jax.random.key(0)
    for window in windows:
        if window <= prompts.shape[1]:
            continue
        state = engine.init_decode_state(window - 1)
        lengths = np.full(engine.slots, prompts.shape[1])
        prefix = engine.prefill(params=params, padded_tokens=prompts[: engine.slots], true_length=lengths)
        entries = [(slot, slot, engine.rows, 0, slot, 10**6) for slot in range(engine.slots)]
        state = engine.bulk_insert(prefix, state, engine.requests(entries), key)
        count, times = min(steps, window - prompts.shape[1]), []
        for _ in range(9):
            # Always the same entries, the last of the window.
            state = state.replace(length=jnp.full_like(state.length, window - count))
            jax.block_until_ready(state)
            start = time.perf_counter()
            state, status = engine.generate_many(params, state, settings, steps=count, free=engine.slots + 1)
            jax.block_until_ready(status)
            times.append((time.perf_counter() - start) / count)
        found[window] = statistics.median(times[1:])
    return found


def _prefill_seconds(engine: Engine, params: Params, prompts: np.ndarray) -> float:
    """Seconds to prefill all prompts, and to insert them with every slot filled at once."""
    rows = engine.prefill_shape(prompts.shape[1])[0]
    lengths, times = np.full(rows, prompts.shape[1]), []
    state = engine.init_decode_state(prompts.shape[1])
    entries = [(slot, slot, engine.rows, 0, slot, 10**6) for slot in range(engine.slots)]
    for _ in range(5):
        start = time.perf_counter()
        prefix = engine.prefill(params=params, padded_tokens=prompts[:rows], true_length=lengths)
        for _ in range(-(-rows // engine.slots)):
            state = engine.bulk_insert(prefix, state, engine.requests(entries), jax.random.key(0))
        jax.block_until_ready(state)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * -(-len(prompts) // rows)


def _schedule(lengths: list[int], slots: int, prompt: int, steps: dict[int, float]) -> float:
    """Sum of the step times, each at the window of its longest live row, when a freed slot is refilled at once."""
    free, rows = [0] * slots, []
    for length in lengths:
        start = heapq.heappop(free)
        rows.append((start, start + length))
        heapq.heappush(free, start + length)
    total = 0.0
    for step in range(max(end for _, end in rows)):
        longest = max(prompt - 1 + step - start for start, end in rows if start <= step < end)
        total += steps[min(window for window in steps if window > longest)]
    return total


def _transformers(
    shape: dict[str, Any], prompts: np.ndarray, tokens: int, limits: np.ndarray
) -> dict[str, Callable[[], Any]]:
    """The same work by transformers: `generate` on the whole batch to the longest row, and continuous batching."""
    try:
        import torch
        from transformers import ContinuousBatchingConfig, GenerationConfig, Qwen3Config, Qwen3ForCausalLM
    except ImportError:
        return {}
    logging.getLogger("transformers").setLevel(logging.ERROR)
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    kinds = {name: value for name, value in shape.items() if name not in ("architecture", "rope_theta")}
    rope = {"rope_type": "default", "rope_theta": float(shape["rope_theta"])}
    theirs = Qwen3ForCausalLM(Qwen3Config(**kinds, rope_parameters=rope, max_position_embeddings=32768)).eval()
    ids = torch.tensor(prompts)
    drawn = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "pad_token_id": 0}

    def whole(count: int) -> None:
        with torch.inference_mode():
            out = theirs.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, min_new_tokens=count,
                                  eos_token_id=None, **drawn)  # fmt: skip
        assert out.shape[1] == prompts.shape[1] + count

    def continuous() -> None:
        blocks = RAGGED_SLOTS * -(-(prompts.shape[1] + int(limits.max())) // 32)
        batching = ContinuousBatchingConfig(page_size=32, num_blocks=blocks, max_batch_tokens=1024,
                                            max_requests_per_batch=RAGGED_SLOTS)  # fmt: skip
        settings = GenerationConfig(eos_token_id=-1, max_new_tokens=int(limits.max()), **drawn)
        manager = theirs.continuous_batching_context_manager(settings, continuous_batching_config=batching)
        with torch.inference_mode(), manager as running:
            for row, limit in zip(prompts.tolist(), limits.tolist(), strict=True):
                running.add_request(row, max_new_tokens=limit)
            done = 0
            for answer in running:
                done += len(answer.generated_tokens) > 0 and answer.is_finished()
                if done == len(prompts):
                    break

    return {
        "uniform_generate": lambda: whole(tokens),
        "ragged_generate": lambda: whole(int(limits.max())),
        "ragged_continuous": continuous,
    }


if __name__ == "__main__":
    main()
