"""A step's buffer on disk, and the updates rebuilt from it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hacrl_jax import archive
from hacrl_jax.types import Buffer, Problem, Rollouts, UserError

PROBLEMS = [
    Problem(7, (("system", "s"), ("user", "2+2? \u2264")), "4", "set"),
    Problem(9, (("user", "x"),), "1", "set"),
]


def buffer(seed: int = 0) -> tuple[Buffer, np.ndarray]:
    """Two agents, two prompts, three samples; zeros past the end of every response, as the sampler leaves it."""
    numbers = np.random.default_rng(seed)
    rollouts, scores = [], []
    for _ in range(2):
        length = numbers.integers(0, 6, 6).astype(np.int32)
        inside = np.arange(5) < length[:, None]
        draw = lambda inside=inside: jnp.asarray(np.where(inside, numbers.normal(size=(6, 5)), 0).astype(np.float32))  # noqa: E731
        rollouts.append(Rollouts(
            prompt=jnp.asarray(numbers.integers(0, 9, (2, 4)), jnp.int32), prompt_length=jnp.asarray([4, 2], jnp.int32),
            response=jnp.asarray(np.where(inside, numbers.integers(1, 9, (6, 5)), 0), jnp.int32),
            length=jnp.asarray(length), logprob=draw(), stopped=jnp.asarray(numbers.integers(0, 2, 6).astype(bool)),
        ))  # fmt: skip
        scores.append(draw())
    reward = numbers.random((2, 6))
    reward[0, 1] = np.nan
    return Buffer(tuple(rollouts), tuple(scores), jnp.asarray(reward, jnp.float32), ((), ())), reward


def test_a_buffer_comes_back_bit_by_bit(tmp_path):
    written, reward = buffer()
    archive.write(tmp_path / archive.name(3), 3, PROBLEMS, written, reward)
    content = (tmp_path / archive.name(3)).read_bytes()
    archive.write(tmp_path / archive.name(3), 3, PROBLEMS, written, reward)
    assert (tmp_path / archive.name(3)).read_bytes() == content
    problems, read, judged = archive.read(tmp_path / archive.name(3))
    assert problems == PROBLEMS and np.array_equal(judged, reward, equal_nan=True) and judged.dtype == np.float64
    assert jax.tree.structure(read) == jax.tree.structure(written)
    for a, b in zip(jax.tree.leaves(written), jax.tree.leaves(read), strict=True):
        assert a.dtype == b.dtype and np.array_equal(a, b, equal_nan=a.dtype == jnp.float32)


def test_only_the_last_steps_stay(tmp_path):
    for step in range(1, 8):
        (tmp_path / archive.name(step)).touch()
        (tmp_path / f"step_{step:06d}.jsonl").touch()
        archive.prune(tmp_path, step, keep=3)
    assert sorted(path.name for path in tmp_path.glob("*.safetensors")) == [archive.name(step) for step in (5, 6, 7)]
    assert len(list(tmp_path.glob("*.jsonl"))) == 7
    archive.prune(tmp_path, 100, keep=0)
    assert len(list(tmp_path.glob("*.safetensors"))) == 3


def test_a_file_that_is_gone_or_broken_is_one_line(tmp_path):
    with pytest.raises(UserError, match=r"does not exist; journal\.tensors"):
        archive.read(tmp_path / archive.name(1))
    archive.write(tmp_path / "x", 1, PROBLEMS, *buffer())
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-9])
    with pytest.raises(UserError, match="is damaged"):
        archive.read(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


@pytest.mark.slow
@pytest.mark.parametrize(("step", "names"), [(2, ["llama"]), (4, [])])
def test_replay_gives_the_recorded_numbers_exactly(finished_run, step, names):
    from hacrl_jax.replay import replay

    said = []
    found = replay(finished_run.folder, step, names, say=said.append)
    assert said[0] == f"from the checkpoint of step {step - 1}" and said[1:] == [f"step {step}"]
    assert [one.agent for one in found] == (names or ["qwen", "llama"])
    for one in found:
        assert one.exact and one.means["grad_norm"] > 0 and len(one.updates) == 2, one


@pytest.mark.slow
def test_replay_refuses_what_it_cannot_rebuild(finished_run):
    from hacrl_jax.replay import replay

    with pytest.raises(UserError, match="no agent 'nobody'"):
        replay(finished_run.folder, 2, ["nobody"])
    with pytest.raises(UserError, match=r"step_00000\d\.safetensors does not exist"):
        replay(finished_run.folder, 9, ["qwen"], say=lambda line: None)
