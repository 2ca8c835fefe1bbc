"""One process of a run on several hosts, for test_hosts.py: python hosts_child.py MODE FOLDER HOSTS_JSON.

Modes: gradient (one update on fixed rows, its results to FOLDER), and ways in which a host can fail.
"""

import json
import os
import resource
import signal
import sys
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from hacrl_jax import hosts, learner, models, sharding
from hacrl_jax.checkpoint import Store
from hacrl_jax.config import AgentConfig, CheckpointConfig, HostsConfig, MeshConfig, ObjectiveConfig
from hacrl_jax.tasks.verify import Verdict
from hacrl_jax.types import Minibatch, UserError

SHAPE = models.DecoderConfig(
    architecture="Qwen3ForCausalLM", vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
    tie_word_embeddings=True, qk_norm=True, max_position_embeddings=512,
)  # fmt: skip
M, T = 16, 12


def rows() -> Minibatch:
    """Ragged rows of which the second half, a whole host's share, is dropped."""
    rng = np.random.default_rng(0)
    end, at = rng.integers(6, T + 1, M)[:, None], np.arange(T)[None]
    valid = np.arange(M)[:, None] < M // 2
    normal = lambda *shape: rng.normal(0, 1, shape).astype(np.float32)  # noqa: E731
    return Minibatch(
        tokens=rng.integers(0, 90, (M, T)).astype(np.int32), positions=np.broadcast_to(at, (M, T)).astype(np.int32),
        segment=(at < end).astype(np.int32), scored=(at >= 4) & (at < end) & valid,
        source_token_logprob=normal(M, T), sampler_token_logprob=normal(M, T), reference_token_logprob=normal(M, T),
        source_logprob=normal(M, 1) * 0.01 - 4.5, advantage=normal(M, 1), capability_ratio=np.ones((M, 1), np.float32),
        source=np.zeros((M, 1), np.int32), valid=valid,
    )  # fmt: skip


def gradient(folder: Path) -> None:
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    graphdef, shapes, axes = models.abstract(SHAPE)
    forward = learner.Forward(graphdef, 90, 1.0, jnp.float32, chunk=16, responses=8)
    objective = ObjectiveConfig(eps_low=0.5, eps_high=0.5)
    with jax.set_mesh(mesh):
        place = sharding.shardings(axes, mesh, shapes)
        params = jax.jit(models.init, static_argnums=0, out_shardings=place)(SHAPE, jax.random.key(0))
        agent = AgentConfig(name="a", model="-", micro_batch=8)
        programs = learner.build(forward, agent, objective, 0, mesh, 10)
        state, outcome = programs.update(programs.init(params), rows(), jnp.int32(1))
        whole = jax.jit(lambda x: x, out_shardings=sharding.replicated(mesh))(state)
    if jax.process_index() == 0:
        leaves = [np.asarray(x) for x in jax.tree.leaves((whole.moments, whole.trainable))]
        np.savez(folder / "result.npz", *leaves, loss=np.asarray(outcome.loss), norm=np.asarray(outcome.grad_norm))


def save(folder: Path, host: int) -> None:
    """A checkpoint of all hosts, for whose second step the disk of one of them is full."""
    mesh = sharding.make_mesh(MeshConfig())
    place = NamedSharding(mesh, PartitionSpec("fsdp"))
    values = np.random.default_rng(0).normal(size=(8, 100_000)).astype(np.float32)
    array = jax.make_array_from_callback(values.shape, place, lambda index: values[index])
    with Store(folder / "c", CheckpointConfig()) as store:
        store.save(1, {"a": {"x": array}}, {})
        store.wait()
        if jax.process_index() == host:
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        store.save(2, {"a": {"x": array}}, {})
        for _ in range(600):
            store.check()
            time.sleep(0.1)


def fail(mode: str) -> None:
    """The second host fails while the first waits: in a program, or for its verdicts."""
    second = jax.process_index() == 1
    grade = lambda answers: [Verdict(answer == "yes", "equal") for answer in answers]  # noqa: E731
    assert [verdict.correct for verdict in hosts.spread(Verdict, grade, ["yes", "no", "yes"])] == [True, False, True]
    hosts.agree("the number", 7)
    if mode == "differs":
        hosts.agree("the config", {"lr": 1 if second else 2})
    if mode == "slow" and second:
        time.sleep(60)
    if mode == "slow":
        hosts.gather("verdicts", None)
    if second:
        if mode == "mistake":
            raise UserError("the data file is not here")
        if mode == "bug":
            raise ZeroDivisionError("a bug")
        if mode == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
    mesh = sharding.make_mesh(MeshConfig())
    with jax.set_mesh(mesh):
        total = jax.jit(jnp.sum, out_shardings=sharding.replicated(mesh))(jnp.ones(8))
        time.sleep(0 if mode == "done" else 60)  # the others are inside a program
    print("sum", float(total))


if __name__ == "__main__":
    mode, folder, settings = sys.argv[1], Path(sys.argv[2]), HostsConfig(**json.loads(sys.argv[3]))
    with hosts.joined(settings):
        match mode:
            case "gradient":
                gradient(folder)
            case "full disk 0" | "full disk 1":
                save(folder, int(mode[-1]))
            case _:
                fail(mode)
