"""Updates per second and peak memory of the learner on fixed work, beside a plain PyTorch update. Prints JSON.

    python scripts/bench_update.py [--repeat 5] [--no-torch]

The work is `update` of $HACRL_SHARED/bench/workloads.json (default: ../shared): forward, GSPO's loss with given
advantages and old log-probs, backward, AdamW, in float32. Every contestant is a process of its own, whose peak resident
memory is read at its end; the processes take turns, one update each, because other work on the machine changes its
speed from minute to minute. Medians are compared. The plain update is transformers' model, log_softmax over all logits
of the response, and torch.optim.AdamW. Where torch is at hand, both start from the same weights, and the two losses of
the first update are printed: they are the same quantity.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors.numpy import save_file

SHARED = Path(os.environ.get("HACRL_SHARED", Path(__file__).parent.parent.parent / "shared"))
LOW, HIGH, RATE = 3e-4, 4e-4, 1e-5


class Work(NamedTuple):
    tokens: np.ndarray  # [B, P + R] int32
    old: np.ndarray  # [B, R] float32 log-probs of the response
    advantage: np.ndarray  # [B] float32


Update = Callable[[], float]
"""One update; gives its loss once everything is done."""
Make = Callable[[Path, Work], Update]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--repeat", type=int, default=5, help="timed updates of each contestant")
    parser.add_argument("--no-torch", action="store_true", help="leave PyTorch out")
    options = parser.parse_args()
    fixed = json.loads((SHARED / "bench" / "workloads.json").read_text("utf-8"))
    sizes = fixed["update"]
    contestants: dict[str, Make] = {"ours": ours}
    if not options.no_torch and find_spec("torch"):
        contestants["torch"] = plain
    result: dict[str, Any] = {}
    for name in ("M1", "M2"):
        shape = fixed["models"][name]
        work = drawn_work(shape["vocab_size"], sizes["prompt_length"], sizes["response_length"], sizes[name]["batch"])
        with tempfile.TemporaryDirectory() as folder:
            write(shape, Path(folder))
            result[name] = compare(contestants, Path(folder), work, options.repeat)
    result["load"] = os.getloadavg()
    print(json.dumps(result, indent=1))


def compare(contestants: dict[str, Make], folder: Path, work: Work, repeat: int) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {who: [] for who in contestants}
    losses, memory = {}, {}
    with started(contestants, folder, work) as lines:
        for turn in range(repeat + 1):  # the first is a warm-up
            for who, line in lines.items():
                line.send("update")
                taken, loss = line.recv()
                if turn == 0:
                    losses[who] = loss
                else:
                    seconds[who].append(taken)
        for who, line in lines.items():
            line.send("memory")
            memory[who] = line.recv()
    median = {who: statistics.median(taken) for who, taken in seconds.items()}
    row = {"updates_per_second": 1 / median["ours"], "seconds": seconds["ours"], "peak_rss_mb": memory["ours"],
           "first_loss": losses["ours"]}  # fmt: skip
    if "torch" in median:
        row |= {"ratio_torch": median["torch"] / median["ours"], "torch_updates_per_second": 1 / median["torch"],
                "torch_seconds": seconds["torch"], "torch_peak_rss_mb": memory["torch"],
                "torch_first_loss": losses["torch"]}  # fmt: skip
    return row


@contextmanager
def started(contestants: dict[str, Make], folder: Path, work: Work) -> Iterator[dict[str, Connection]]:
    """A process for each contestant, ready to update, and the line to it."""
    context = multiprocessing.get_context("spawn")
    lines: dict[str, Connection] = {}
    processes = []
    for who, make in contestants.items():
        lines[who], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, make, folder, work), daemon=True))
        processes[-1].start()
        theirs.close()
        lines[who].recv()
    yield lines
    for line in lines.values():
        line.close()
    for process in processes:
        process.join()


def serve(line: Connection, make: Make, folder: Path, work: Work) -> None:
    """A contestant's process: an update, or its peak memory, as often as asked."""
    update = make(folder, work)
    line.send("ready")
    while True:
        try:
            wanted = line.recv()
        except EOFError:
            return
        if wanted == "memory":
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss  # KiB on Linux, bytes on macOS
            line.send(peak / (2**20 if sys.platform == "darwin" else 2**10))
            continue
        start = time.perf_counter()
        loss = update()
        line.send((time.perf_counter() - start, loss))


def drawn_work(vocabulary: int, prompt: int, response: int, batch: int) -> Work:
    rng = np.random.default_rng(2)
    tokens = rng.integers(1, vocabulary, (batch, prompt + response), dtype=np.int32)
    # Near the uniform distribution that random weights give: ratios on both sides of the clip.
    old = (rng.normal(0, 0.01, (batch, response)) - np.log(vocabulary)).astype(np.float32)
    return Work(tokens, old, rng.normal(0, 1, batch).astype(np.float32))


def write(shape: dict[str, Any], folder: Path) -> None:
    """A model of this shape in Hugging Face format: float32, deviation 0.02, norms 1."""
    rng, d, h, f = np.random.default_rng(3), shape["hidden_size"], shape["head_dim"], shape["intermediate_size"]
    q, kv = shape["num_attention_heads"] * h, shape["num_key_value_heads"] * h
    kernels = {
        "self_attn.q_proj": (q, d), "self_attn.k_proj": (kv, d), "self_attn.v_proj": (kv, d),
        "self_attn.o_proj": (d, q), "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f),
    }  # fmt: skip
    norms = {"input_layernorm": d, "post_attention_layernorm": d, "self_attn.q_norm": h, "self_attn.k_norm": h}

    def drawn(*size: int) -> np.ndarray:
        return np.float32(0.02) * rng.standard_normal(size, dtype=np.float32)

    tensors = {"model.embed_tokens.weight": drawn(shape["vocab_size"], d), "model.norm.weight": np.ones(d, np.float32)}
    for layer in range(shape["num_hidden_layers"]):
        tensors |= {f"model.layers.{layer}.{name}.weight": drawn(*size) for name, size in kernels.items()}
        tensors |= {f"model.layers.{layer}.{name}.weight": np.ones(size, np.float32) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {key: value for key, value in shape.items() if key != "architecture"} | {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "rms_norm_eps": 1e-6, "hidden_act": "silu",
        "max_position_embeddings": 32768, "attention_bias": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config), "utf-8")


def minibatch_of(work: Work) -> Any:
    """As a Minibatch on the device: whole rows, all own, all valid."""
    import jax
    import jax.numpy as jnp

    from hacrl_jax.types import Minibatch

    (rows, length), responses = work.tokens.shape, work.old.shape[1]
    old = np.concatenate([np.zeros((rows, length - responses), np.float32), work.old], axis=1)
    zero, one = np.zeros((rows, length), np.float32), np.ones((rows, 1), np.float32)
    return jax.tree.map(jnp.asarray, Minibatch(
        tokens=work.tokens, positions=np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length)),
        segment=np.ones((rows, length), np.int32),
        scored=np.broadcast_to(np.arange(length) >= length - responses, (rows, length)),
        source_token_logprob=old, sampler_token_logprob=zero, reference_token_logprob=zero,
        source_logprob=work.old.mean(axis=1, keepdims=True), advantage=work.advantage[:, None], capability_ratio=one,
        source=np.zeros((rows, 1), np.int32), valid=np.ones((rows, 1), bool),
    ))  # fmt: skip


def ours(folder: Path, work: Work) -> Update:
    import jax
    import jax.numpy as jnp

    from hacrl_jax import learner, models
    from hacrl_jax.config import AgentConfig, MeshConfig, ObjectiveConfig, OptimizerConfig
    from hacrl_jax.sharding import make_mesh

    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    graphdef, config, params = models.load(folder, mesh=mesh)
    responses = work.old.shape[1]
    objective = ObjectiveConfig(eps_low=LOW, eps_high=HIGH, kl_coefficient=0.0, cross="none")
    agent = AgentConfig(name="a", model=str(folder), optimizer=OptimizerConfig(lr=RATE, grad_clip=0.0))
    forward = learner.Forward(
        graphdef, config.vocab_size, 1.0, jnp.float32, agent.logprob_chunk, responses, remat=agent.remat
    )
    programs = learner.build(forward, agent, objective, 0, mesh, total_updates=1)
    minibatch = minibatch_of(work)
    second = jnp.int32(1)  # at the first update of a step the ratio is 1 by definition
    with jax.set_mesh(mesh):
        state = programs.init(params)
    del params

    def update() -> float:
        nonlocal state
        with jax.set_mesh(mesh):
            state, outcome = programs.update(state, minibatch, second)
        jax.block_until_ready(state)
        return float(outcome.loss)

    return update


def plain(folder: Path, work: Work) -> Update:
    import torch
    from transformers import Qwen3ForCausalLM

    torch.set_num_threads(os.cpu_count() or 1)
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    tokens, responses = torch.tensor(work.tokens).long(), work.old.shape[1]
    old, advantage = torch.tensor(work.old), torch.tensor(work.advantage)

    def update() -> float:
        logits = model(input_ids=tokens, use_cache=False).logits[:, -responses - 1 : -1]
        logprob = logits.log_softmax(-1).gather(-1, tokens[:, -responses:, None])[..., 0]
        ratio = torch.exp((logprob - old).mean(-1))
        loss = -torch.minimum(ratio * advantage, ratio.clamp(1 - LOW, 1 + HIGH) * advantage).mean()
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        return loss.item()

    return update


if __name__ == "__main__":
    main()
