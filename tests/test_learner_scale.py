"""The learner at scale: memory as the compiler states it, little padding, host memory, nothing compiled twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small_run

from hacrl_jax import algorithm, logprobs, metrics, packing, sharding
from hacrl_jax.config import AgentConfig, MeshConfig
from hacrl_jax.types import UserError

V, D, B = 151_936, 1_024, 8  # Qwen3-0.6B's head


def plain(head, hidden, target):
    logits = jnp.einsum("mnd,vd->mnv", hidden, head)
    return jnp.take_along_axis(jax.nn.log_softmax(logits), target[..., None], axis=-1).sum()


def chunked(head, hidden, target):
    return logprobs.head_logprobs(head, hidden, target, V, 1.0, AgentConfig(name="a", model="-").logprob_chunk)[0].sum()


def gradient_temporaries(function, length: int) -> int:
    """Bytes beside arguments and results of the gradient in head and hidden states, from the compiler."""
    shapes = jnp.zeros((V, D)), jnp.zeros((B, length, D)), jnp.zeros((B, length), jnp.int32)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), jax.eval_shape(lambda: shapes))
    compiled = jax.jit(jax.grad(function, (0, 1))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_the_gradient_of_logprobs_needs_an_eighth_of_the_plain_ones_memory():
    ours, longer = (gradient_temporaries(chunked, length) for length in (1024, 2048))
    whole = gradient_temporaries(plain, 1024)
    print({"plain": whole, "chunked": ours, "chunked, twice the tokens": longer})
    assert whole > 9e9
    assert ours <= whole / 8
    assert longer - ours <= 1.1 * B * 1024 * D * 4  # the hidden states of the tokens that were added


def test_splash_is_refused_where_there_is_no_tpu(tmp_path):
    config = small_run.config(tmp_path, agents={"llama": {"attention": "splash"}})
    with pytest.raises(UserError, match=r"agents\.1\.attention: splash is a kernel for TPU.*cpu.*attention=xla"):
        algorithm.train(config, show=False)
    assert not list(tmp_path.iterdir())
    sharding.check_agents(small_run.config(tmp_path), sharding.make_mesh(MeshConfig(), jax.devices()[:2]))


@pytest.mark.parametrize("seed", range(3))
def test_a_ragged_minibatch_is_packed_with_a_tenth_of_padding_at_most(seed):
    """Lengths of the paper's size with a long tail; rows of a last micro-batch that stay empty count as padding."""
    rng, rows, length, micro_batch = np.random.default_rng(seed), 512, 5120, 4
    prompt = np.minimum(rng.lognormal(np.log(150), 0.5, rows), 1024).astype(int)
    lengths = prompt + np.minimum(rng.lognormal(np.log(700), 0.9, rows), 4096).astype(int)
    lengths *= rng.random(rows) < 0.95  # some were dropped
    used = int(jax.jit(packing.place, static_argnums=1)(jnp.asarray(lengths, jnp.int32), length).used)
    packed = -(-used // micro_batch) * micro_batch
    padding = 1 - lengths.sum() / (packed * length)
    print(f"padding {padding:.1%} of {packed} rows; unpacked {1 - lengths.sum() / (rows * length):.1%} of {rows}")
    assert padding <= 0.1


def rows_of(config) -> list[dict]:
    timed = ("time/", "tokens_per_second")
    lines = metrics.read(algorithm.train(config, show=False).folder / "metrics.jsonl")
    return [{key: value for key, value in row.items() if not key.startswith(timed)} for row in lines]


@pytest.mark.slow
def test_what_waits_in_host_memory_changes_no_result(tmp_path):
    here, away = (
        rows_of(small_run.config(
            tmp_path, name=name, steps=2, minibatch=4, mesh={"fsdp": 1}, checkpoint={"every": 0},
            rollout={"prompts": 4, "samples": 2, "slots": 2, "max_response": 24},
            agents={own: {"offload": where} for own, where in zip(small_run.NAMES, places, strict=True)},
        ))
        for name, places in (("here", ("none", "none")), ("away", ("moments", "all")))
    )  # fmt: skip
    assert here == away
    assert sum("loss" in row for row in here) == 4


@pytest.mark.slow
def test_agents_with_axes_of_their_own_share_the_devices(tmp_path):
    """The first update of each agent: the same answers, rewards and gradients on any axes."""
    alike, apart = (
        rows_of(small_run.config(
            tmp_path, name=name, steps=1, minibatch=4, checkpoint={"every": 0}, agents=agents,
            rollout={"prompts": 4, "samples": 2, "slots": 2, "max_response": 24},
        ))
        for name, agents in (("alike", {}), ("apart", {"llama": {"mesh": {"fsdp": 1, "tensor": 2}}}))
    )  # fmt: skip
    for one, other in zip(alike, apart, strict=True):
        assert one.keys() == other.keys() and one["reward"] == other["reward"]
        np.testing.assert_allclose(other["grad_norm"], one["grad_norm"], rtol=1e-4)


def test_an_agent_uses_all_devices_of_its_run(tmp_path):
    config = small_run.config(tmp_path, agents={"llama": {"mesh": {"fsdp": 2}}})
    with pytest.raises(UserError, match=r"agents\.1\.mesh: it has 2 of the run's 4 devices"):
        sharding.check_agents(config, sharding.make_mesh(MeshConfig(), jax.devices()[:4]))


@pytest.mark.slow
def test_nothing_is_compiled_after_the_second_step_of_fifty(tmp_path, monkeypatch):
    compiled, after = [], {}
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **details: compiled.append(details.get("fun_name")) if "backend_compile" in event else None
    )
    step = algorithm.train_step

    def counted(problems, number, *arguments):
        result = step(problems, number, *arguments)
        after[number] = len(compiled)
        return result

    monkeypatch.setattr(algorithm, "train_step", counted)
    config = small_run.config(
        tmp_path, steps=50, minibatch=4, mesh={"fsdp": 1}, checkpoint={"every": 0}, journal={"keep_tensors": 1},
        data={"arithmetic": {"digits": 2, "size": 400}}, rollout={"prompts": 4, "samples": 2, "slots": 4},
        agents={"qwen": {"packing": True, "micro_batch": 2}},
    )  # fmt: skip
    folder = algorithm.train(config, show=False).folder
    lengths = {row["response_length"] for row in metrics.read(folder / "metrics.jsonl") if "response_length" in row}
    assert len(after) == 50 and len(lengths) > 20
    assert after[2] > 0 and compiled[after[2] : after[50]] == []  # the last checkpoint comes later
