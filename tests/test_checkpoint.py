"""Checkpoints: whole or not there, found out when damaged, the same on any number of devices."""

import logging
import os
import resource
import shutil
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hacrl_jax import checkpoint
from hacrl_jax.checkpoint import Store
from hacrl_jax.config import CheckpointConfig
from hacrl_jax.learner import LearnerState
from hacrl_jax.types import UserError

NAMES = ("small", "../la/rge")  # names come from users


def mesh(devices: int) -> Mesh:
    return Mesh(np.asarray(jax.devices()[:devices]), ("fsdp",))


def state(seed: int, devices: int = 1) -> LearnerState:
    """A state like a learner's, with everything that differs between steps."""
    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh(devices), PartitionSpec(*axes)))  # noqa: E731
    numbers = np.random.default_rng(seed)
    kernel = lambda: place(numbers.normal(size=(3, 16, 8)).astype(np.float32), None, "fsdp")  # noqa: E731
    weights = {"layers": {"q_proj": {"kernel": kernel()}}, "norm": place(numbers.normal(size=5).astype(np.float32))}
    moments = ({"mu": kernel()}, {"nu": kernel()}, place(np.int32(seed)))
    return LearnerState(weights, None, moments, jnp.int32(3 * seed))


def agents(seed: int, devices: int = 1) -> dict[str, LearnerState]:
    return {name: state(seed + 100 * k, devices) for k, name in enumerate(NAMES)}


def same(a, b) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def saved(folder, steps=(1, 2, 3), **settings) -> None:
    with Store(folder, CheckpointConfig(keep_last=10, **settings)) as store:
        for step in steps:
            store.save(step, agents(step), {"ability": [step]})


def opened(folder, last=None, like=None, devices=1):
    said = []
    with Store(folder, CheckpointConfig(), write=False) as store:
        return store.restore(like or agents(0, devices), said.append, last=last), said


def data_file(folder):
    return max((file for file in folder.rglob("d/*") if file.is_file()), key=lambda file: file.stat().st_size)


def test_what_is_saved_comes_back(tmp_path):
    saved(tmp_path / "c")
    restored, said = opened(tmp_path / "c")
    assert (restored.step, restored.record["ability"], said) == (3, [3], [])
    assert same(restored.agents, agents(3))
    assert opened(tmp_path / "c", last=2)[0].step == 2
    alone, _ = opened(tmp_path / "c", like={NAMES[1]: state(0)})  # one agent of several
    assert same(alone.agents[NAMES[1]], agents(3)[NAMES[1]])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c"]  # no name escapes the folder


def test_what_asks_for_a_save_is_not_taken_for_its_failure(tmp_path):
    with Store(tmp_path / "c", CheckpointConfig()) as store:
        try:
            raise UserError("SIGTERM")
        except UserError:  # as a run that a signal ends
            store.save(1, agents(1), {})
            store.wait()
    assert opened(tmp_path / "c")[0].step == 1


def test_nothing_saved_is_none(tmp_path):
    assert opened(tmp_path / "nowhere") == (None, [])


def test_keep_last_and_keep_every(tmp_path):
    with Store(tmp_path, CheckpointConfig(keep_last=2, keep_every=3)) as store:
        for step in range(1, 9):
            store.save(step, agents(step), {})
    assert sorted(int(path.name[5:]) for path in tmp_path.iterdir()) == [3, 6, 7, 8]


def test_a_save_does_not_see_later_updates(tmp_path):
    own = state(1, 8)
    expected = jax.device_get(own)
    update = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    with Store(tmp_path, CheckpointConfig()) as store:
        store.save(1, {"a": own}, {})
        own = update(update(own))
    restored, _ = opened(tmp_path, like={"a": state(0, 8)})
    assert same(restored.agents["a"], expected)


def truncate(step):
    os.truncate(data_file(step), data_file(step).stat().st_size // 2)


def flip(step):
    content = bytearray(data_file(step).read_bytes())
    content[len(content) // 2] ^= 1
    data_file(step).write_bytes(content)


def empty(step):
    shutil.rmtree(step)
    step.mkdir()


DAMAGES = {
    "truncated": truncate,
    "altered": flip,
    "empty": empty,
    "without an agent": lambda step: shutil.rmtree(step / "agent.small"),
    "without record": lambda step: shutil.rmtree(step / "record"),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_damaged_step_is_skipped_with_one_clean_line(tmp_path, damage, capfd, caplog):
    saved(tmp_path)
    damage(tmp_path / "step_3")
    with caplog.at_level(logging.WARNING):
        restored, said = opened(tmp_path)
    assert restored.step == 2 and same(restored.agents, agents(2))
    assert len(said) == 1 and said[0].startswith("warning: checkpoint of step 3 is damaged and skipped: ")
    assert len(said[0]) < 300 and "\n" not in said[0]
    assert capfd.readouterr() == ("", "")
    assert not [record for record in caplog.records if record.name in ("absl", "asyncio")]
    with Store(tmp_path, CheckpointConfig()) as store:  # the run goes on and saves that step again
        store.set_aside(after=2)
        store.save(3, agents(33), {})
    assert same(opened(tmp_path)[0].agents, agents(33))


def test_all_steps_damaged_is_an_error_not_a_fresh_start(tmp_path):
    saved(tmp_path, (1, 2))
    truncate(tmp_path / "step_1")
    empty(tmp_path / "step_2")
    with pytest.raises(UserError, match=r"none of the checkpoints .* opens whole"):
        opened(tmp_path)


def test_missing_optimizer_state_is_an_error(tmp_path):
    with Store(tmp_path, CheckpointConfig()) as store:
        store.save(1, {"small": state(1).replace(moments=None)}, {})
    with pytest.raises(UserError, match=r"does not fit agent small: it lacks moments/0/mu, moments/1/nu, moments/2"):
        opened(tmp_path, like={"small": state(0)})
    with pytest.raises(UserError, match="was saved without agent other"):
        opened(tmp_path, like={"other": state(0)})


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_eight_devices_to_fewer(tmp_path, devices):
    with Store(tmp_path, CheckpointConfig()) as store:
        store.save(7, agents(7, 8), {})
    restored, _ = opened(tmp_path, devices=devices)
    assert restored.step == 7 and same(restored.agents, agents(7))
    for leaf in jax.tree.leaves(restored.agents):
        assert len(leaf.devices()) == devices  # scalars too: an update takes arrays of one mesh only


def test_a_state_that_waits_in_host_memory_is_saved_and_comes_back_there(tmp_path):
    host = lambda tree: jax.tree.map(lambda x: jax.device_put(x, x.sharding.with_memory_kind("pinned_host")), tree)  # noqa: E731
    own = state(1, 8)
    with Store(tmp_path, CheckpointConfig()) as store:
        store.save(1, {"a": own.replace(moments=host(own.moments))}, {})
    like = state(0, 8)
    restored, said = opened(tmp_path, like={"a": like.replace(moments=host(like.moments))})
    assert said == [] and same(restored.agents["a"], own)
    kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(restored.agents["a"].moments)}
    assert kinds == {"pinned_host"}
    assert checkpoint.fingerprint(restored.agents["a"]) == checkpoint.fingerprint(own)


def test_a_fingerprint_is_of_values_not_of_layout():
    assert checkpoint.fingerprint(state(1)) == checkpoint.fingerprint(state(1, 8))
    swapped = jnp.asarray([1.0, 3.0, 2.0])
    assert checkpoint.fingerprint([jnp.asarray([1.0, 2.0, 3.0])]) != checkpoint.fingerprint([swapped])


def test_a_reader_leaves_a_running_save_alone(tmp_path):
    saved(tmp_path)
    running = tmp_path / "step_4.orbax-checkpoint-tmp"
    running.mkdir()
    assert opened(tmp_path)[0].step == 3 and running.exists()
    with Store(tmp_path, CheckpointConfig()) as store:  # the next writer clears it away
        store.save(5, agents(5), {})
    assert not running.exists()


def test_a_save_that_fails_stops_the_run_and_harms_nothing(tmp_path):
    big = {"a": jnp.asarray(np.random.default_rng(0).normal(size=500_000).astype(np.float32))}
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = Store(tmp_path, CheckpointConfig(keep_last=1))
    store.save(1, {"a": big}, {})
    store.wait()
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
        with pytest.raises(UserError, match=r"step 2 could not be saved .*file too large.* complete .* is of step 1"):
            store.save(2, {"a": jax.tree.map(lambda x: x + 1, big)}, {})
            for _ in range(600):  # what the run does at every sign of life; it never waits
                store.check()
                time.sleep(0.05)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    with pytest.raises(UserError, match="step 2 could not be saved"):
        store.close()
    restored, said = opened(tmp_path, like={"a": jax.tree.map(jnp.zeros_like, big)})
    assert (restored.step, said) == (1, []) and same(restored.agents["a"], big)


def test_any_fsspec_url_serves_and_a_step_counts_when_all_of_it_is_there():
    import fsspec

    url, files = "memory://bucket/run", fsspec.filesystem("memory")
    with Store(url, CheckpointConfig(keep_last=2, keep_every=4)) as store:
        for step in range(1, 8):
            store.save(step, agents(step), {})
    kept = sorted(path.rsplit("/", 1)[-1] for path in files.ls("/bucket/run", detail=False))
    assert kept == sorted(name for step in (4, 6, 7) for name in (f"step_{step}", f"step_{step}.json"))
    restored, said = opened(url)
    assert (restored.step, said) == (7, []) and same(restored.agents, agents(7))
    longest = max(files.find("/bucket/run/step_7"), key=files.size)
    files.pipe_file(longest, files.cat_file(longest)[:-100])
    assert opened(url)[0].step == 6
    files.rm("/bucket/run/step_6.json")
    assert opened(url)[0].step == 4
    with Store(url, CheckpointConfig(keep_last=2, keep_every=4)) as store:
        store.set_aside(after=4)
        store.save(5, agents(55), {})
    assert same(opened(url)[0].agents, agents(55))
    files.rm("/bucket", recursive=True)


def test_an_unknown_kind_of_url_is_a_mistake():
    with pytest.raises(UserError, match=r"checkpoint\.folder nowhere://x cannot be reached"):
        Store("nowhere://x", CheckpointConfig())


def test_a_place_that_is_lost_while_saving_is_one_line(monkeypatch):
    def lost(*_):
        raise OSError("no route to host")

    store = Store("memory://lost/run", CheckpointConfig())
    monkeypatch.setattr(checkpoint.Mirror, "push", lost)
    monkeypatch.setattr(checkpoint.Mirror, "steps", lost)
    store.save(1, {"a": {"x": jnp.zeros(3)}}, {})
    with pytest.raises(UserError, match="step 1 could not be saved in memory://lost/run: no route to host; the folder"):
        store.wait()
    with pytest.raises(UserError, match="no route"):
        store.close()


def test_a_bucket_is_handed_on_as_it_is(monkeypatch):
    """No bucket is within reach of the tests: this is the address that orbax and tensorstore get."""
    seen = []

    def manager(folder, options):
        seen.append(str(folder))

    def opened(spec, **_):
        seen.append(spec["kvstore"]["base"])
        raise ValueError("seen")

    monkeypatch.setattr(checkpoint.ocp, "CheckpointManager", manager)
    monkeypatch.setattr(checkpoint.tensorstore, "open", opened)
    assert Store("gs://bucket/runs/mine", CheckpointConfig()).folder == "gs://bucket/runs/mine"
    with pytest.raises(ValueError, match="seen"):
        checkpoint.load_array("gs://bucket/runs/mine/step_3", "a/b", "x", None)
    base = {"driver": "gcs", "bucket": "bucket", "path": "runs/mine/step_3/agent.a%2Fb/"}
    assert seen == ["gs://bucket/runs/mine", base]
