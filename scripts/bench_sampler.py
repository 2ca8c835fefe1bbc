"""Useful tokens per second of the sampler on fixed work, beside transformers' `generate` in the same run. Prints JSON.

    python scripts/bench_sampler.py [--repeat 3] [--no-torch]

The work is sample_uniform and sample_ragged of $HACRL_SHARED/bench/workloads.json (default: ../shared). Ragged rows end
at lengths that the scheduler does not know: an array on the device ends them. `bound` is what the decode steps alone
would give with all slots busy; `schedule` is the sum of the step times, each at its own number of slots and window,
that the schedule needs if a row's end takes effect at once, with the prefills and insertions it needs. Where the engine
has several lanes, `bound` is from steps of all of them at once, and `schedule` adds up the steps of each as they are
alone: the wall time may be below it. The runs of all contestants alternate, and medians are compared, because other
work on the machine changes its speed from minute to minute.
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
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hacrl_jax.config import RolloutConfig
from hacrl_jax.models import decoder
from hacrl_jax.models.decoder import DecoderConfig
from hacrl_jax.sampler.decode import DecodeState
from hacrl_jax.sampler.engine import Engine
from hacrl_jax.sampler.rollout import rollout
from hacrl_jax.sampler.sampling import sampling
from hacrl_jax.types import Params

SHARED = Path(os.environ.get("HACRL_SHARED", Path(__file__).parent.parent.parent / "shared"))
CONTINUOUS_ROWS = 16  # rows in flight of transformers' continuous batching, with which the peers' figure was made


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
        "uniform": _made(config, params, len(prompts), uniform["new_tokens"]),
        "ragged": _made(config, params, len(prompts), int(limits.max())),
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
    for name, lengths in (("uniform", np.full(len(prompts), uniform["new_tokens"])), ("ragged", limits)):
        engine, copy = ours[name]
        steps, busy = step_seconds(engine, copy, 1), step_seconds(engine, copy, engine.lanes)
        fixed = _prefill_seconds(engine, copy, prompts)
        parts, row = np.array_split(lengths, engine.lanes), result[name]
        decode = sum(_schedule(engine, part.tolist(), prompts.shape[1], steps) for part in parts)
        step = statistics.mean(taken for (slots, _), taken in busy.items() if slots == engine.slots)
        bound = float(lengths.sum()) / (engine.slots * engine.lanes) * step
        row |= {
            "lanes": engine.lanes,
            "bound_seconds": bound,
            "ratio_bound": bound / row["seconds"],
            "prefill_seconds": fixed,
            "schedule_seconds": decode + fixed,
            "wall_over_schedule": row["seconds"] / (decode + fixed),
            "step_milliseconds": {f"{slots} x {window}": 1e3 * taken for (slots, window), taken in steps.items()},
        }
    result["load"] = os.getloadavg()
    print(json.dumps(result, indent=1))


def _model(shape: dict[str, Any]) -> tuple[DecoderConfig, Params]:
    config = DecoderConfig(
        "Qwen3ForCausalLM", shape["vocab_size"], shape["hidden_size"], shape["intermediate_size"],
        shape["num_hidden_layers"], shape["num_attention_heads"], shape["num_key_value_heads"], shape["head_dim"], 1e-6,
        shape["rope_theta"], None, shape["tie_word_embeddings"], True, 32768,
    )  # fmt: skip
    return config, decoder.init(config, jax.random.key(0))


def _made(config: DecoderConfig, params: Params, rows: int, response: int) -> tuple[Engine, Params]:
    graphdef, shapes, _ = decoder.abstract(config)
    settings = RolloutConfig(prompts=rows, samples=1, max_prompt=64, max_response=response)
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


def step_seconds(engine: Engine, params: Params, lanes: int) -> dict[tuple[int, int], float]:
    """Seconds of one decode step of so many lanes at once, with all slots busy, for each (slots, window)."""
    settings, count, found = sampling(1.0), engine.config.dispatch_steps, {}
    states = [engine.init_decode_state(0) for _ in range(lanes)]

    def filled(state: DecodeState) -> DecodeState:
        """Always the same entries, the last of the window."""
        full = partial(jnp.full_like, state.length)
        return state.replace(length=full(state.window - count), step=full(0), limit=full(10**6), row=full(engine.rows),
                             live=jnp.ones_like(state.live))  # fmt: skip

    def dispatch(state: DecodeState) -> DecodeState:
        state, status = engine.generate_many(params, state, settings, steps=count, free=state.slots + 1)
        jax.block_until_ready(status)
        return state

    for slots in reversed(engine.slot_counts):
        while states[0].slots > slots:
            states = [engine.shrink(state, []) for state in states]
        for window in engine.windows_of(slots):
            states, times = [engine.resize(state, window) for state in states], []
            for _ in range(9):
                states = jax.block_until_ready([filled(state) for state in states])
                start = time.perf_counter()
                states = _at_once(dispatch, states)
                times.append((time.perf_counter() - start) / count)
            found[slots, window] = statistics.median(times[1:])
    return found


def _prefill_seconds(engine: Engine, params: Params, prompts: np.ndarray) -> float:
    """Seconds to prefill all prompts, and to insert them with every slot filled at once."""
    rows = engine.prefill_shape(prompts.shape[1])[0]
    lengths, times = np.full(rows, prompts.shape[1]), []
    states = [engine.init_decode_state(prompts.shape[1]) for _ in range(engine.lanes)]
    entries = [(slot, slot, engine.rows, 0, slot, 10**6) for slot in range(engine.slots)]

    def fill(state: DecodeState) -> DecodeState:
        prefix = engine.prefill(params=params, padded_tokens=prompts[:rows], true_length=lengths)
        for _ in range(-(-rows // engine.slots)):
            state = engine.bulk_insert(prefix, state, engine.requests(entries), jax.random.key(0))
        return jax.block_until_ready(state)

    for _ in range(5):
        start = time.perf_counter()
        states = _at_once(fill, states)
        times.append(time.perf_counter() - start)
    return statistics.median(times[1:]) * -(-len(prompts) // (rows * engine.lanes))


def _at_once(function: Callable[[DecodeState], DecodeState], states: list[DecodeState]) -> list[DecodeState]:
    with ThreadPoolExecutor(len(states)) as threads:
        return list(threads.map(function, states))


def _schedule(engine: Engine, lengths: list[int], prompt: int, steps: dict[tuple[int, int], float]) -> float:
    """Sum of the step times, each at the slots and the window that its live rows need, when a freed slot is refilled at
    once and, without a waiting row, fewer slots are taken at once."""
    free, rows = [0] * engine.slots, []
    for length in lengths:
        start = heapq.heappop(free)
        rows.append((start, start + length))
        heapq.heappush(free, start + length)
    last, total = max(start for start, _ in rows), 0.0
    for step in range(max(end for _, end in rows)):
        live = [prompt - 1 + step - start for start, end in rows if start <= step < end]
        slots = min(count for count in engine.slot_counts if count >= len(live) or count == engine.slots)
        slots = slots if step >= last else engine.slots
        total += steps[slots, engine.window(max(live), slots)]
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
        blocks = CONTINUOUS_ROWS * -(-(prompts.shape[1] + int(limits.max())) // 32)
        batching = ContinuousBatchingConfig(page_size=32, num_blocks=blocks, max_batch_tokens=1024,
                                            max_requests_per_batch=CONTINUOUS_ROWS)  # fmt: skip
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
