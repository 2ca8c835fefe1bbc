"""The learner: chunked log-probs against the plain ones, and the same update for every split and mesh."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hacrl_jax import learner, logprobs, models, packing
from hacrl_jax.config import AgentConfig, LoraConfig, MeshConfig, ObjectiveConfig, OptimizerConfig
from hacrl_jax.sharding import make_mesh
from hacrl_jax.types import Minibatch

V, IDS, P, R, M = 96, 90, 5, 7, 16
T = P + R
CONFIG = models.DecoderConfig(
    architecture="Qwen3ForCausalLM", vocab_size=V, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
    num_attention_heads=8, num_key_value_heads=4, head_dim=8, rms_norm_eps=1e-6, rope_theta=1e4, rope_scaling=None,
    tie_word_embeddings=True, qk_norm=True, max_position_embeddings=512,
)  # fmt: skip
OBJECTIVE = ObjectiveConfig(eps_low=0.05, eps_high=0.05, kl_coefficient=0.01)
UNCLIPPED = OptimizerConfig(lr=1e-3, grad_clip=0.0)
AGENT = AgentConfig(name="a", model="-", dtype="float32", optimizer=OptimizerConfig(lr=1e-3))


def forward(graphdef, **changes):
    plain = learner.Forward(graphdef, IDS, 0.7, jnp.float32, chunk=13, responses=R)
    return dataclasses.replace(plain, **changes)


GROUP = 4


def batch(seed: int = 0) -> Minibatch:
    """Rows of ragged prompts and responses from two sources, GROUP in turn with one prompt; the last row is dropped."""
    rng = np.random.default_rng(seed)
    prompt = rng.integers(1, P + 1, M // GROUP).repeat(GROUP)[:, None]
    end = prompt + rng.integers(1, R + 1, M)[:, None]
    at = np.arange(T)[None]
    valid = np.arange(M)[:, None] < M - 1
    ids = rng.integers(0, IDS, (M, T))
    ids = np.where(at < prompt, ids[::GROUP].repeat(GROUP, axis=0), ids)
    return jax.tree.map(jnp.asarray, Minibatch(
        tokens=np.where(at < end, ids, 0).astype(np.int32),
        positions=np.broadcast_to(at, (M, T)).astype(np.int32),
        segment=(at < end).astype(np.int32),
        scored=(at >= prompt) & (at < end) & valid,
        source_token_logprob=rng.normal(-4, 0.2, (M, T)).astype(np.float32),
        sampler_token_logprob=rng.normal(-4, 0.2, (M, T)).astype(np.float32),
        reference_token_logprob=rng.normal(-4, 0.2, (M, T)).astype(np.float32),
        source_logprob=rng.normal(-4.4, 0.05, (M, 1)).astype(np.float32),
        advantage=rng.normal(0, 1, (M, 1)).astype(np.float32),
        capability_ratio=rng.uniform(0.5, 2, (M, 1)).astype(np.float32),
        source=rng.integers(0, 2, (M, 1)).astype(np.int32),
        valid=valid,
    ))  # fmt: skip


def one_update(*arguments, **changes):
    return updates(1, *arguments, **changes)[0]


def updates(times, mesh=None, lora=None, m=1, poison=False, rows=None, group=1, **agent):
    """(state, outcome) after each of so many updates on the same rows."""
    mesh = mesh or make_mesh(MeshConfig(), jax.devices()[:1])
    graphdef, abstract, axes = models.abstract(CONFIG, lora)
    from hacrl_jax.sharding import sharding, shardings

    params = jax.device_put(models.init(CONFIG, jax.random.key(0), lora), shardings(axes, mesh, abstract))
    rows = batch() if rows is None else rows
    if poison:
        rows = rows.replace(advantage=rows.advantage.at[0].set(jnp.nan))
    rows = jax.tree.map(lambda x: jax.device_put(x, sharding(mesh, "batch", shape=x.shape[:1])), rows)
    with jax.set_mesh(mesh):
        programs = learner.build(
            forward(graphdef, group=group), AGENT.model_copy(update=agent), OBJECTIVE, 0, mesh, 10
        )  # fmt: skip
        state, found = programs.init(params), []
        for _ in range(times):
            state, outcome = programs.update(state, rows, jnp.asarray(m, jnp.int32))
            found.append((jax.tree.map(np.array, state), jax.device_get(outcome)))
    return found


def test_logprobs_and_entropy_equal_the_plain_softmax():
    graphdef, _, _ = models.abstract(CONFIG)
    params = models.init(CONFIG, jax.random.key(1))
    rows = batch()
    logprob, entropy = learner.token_logprobs(forward(graphdef), params, rows)
    hidden, _ = models.apply(graphdef, params, rows.tokens, rows.positions, segment=rows.segment)
    logits = models.logits(params, hidden)[..., :IDS] / 0.7
    plain = jax.nn.log_softmax(logits)[:, :-1]
    expected = jnp.take_along_axis(plain, rows.tokens[:, 1:, None], axis=2)[..., 0]
    scored = rows.scored[:, 1:]
    chex.assert_trees_all_close(logprob[:, 1:][scored], expected[scored], atol=1e-5)
    chex.assert_trees_all_close(entropy[:, 1:][scored], -(jnp.exp(plain) * plain).sum(-1)[scored], atol=1e-5)
    assert not np.any(logprob[~rows.scored])


def test_logprob_gradient_equals_the_plain_softmax():
    rng = np.random.default_rng(0)
    head, hidden = jnp.asarray(rng.normal(size=(V, 8))), jnp.asarray(rng.normal(size=(21, 8)))
    target, weight = jnp.asarray(rng.integers(0, IDS, 21)), jnp.asarray(rng.normal(size=21))

    def plain(head, hidden):
        logprob = jax.nn.log_softmax((hidden @ head.T)[:, :IDS] / 0.7)
        return jnp.sum(weight * jnp.take_along_axis(logprob, target[:, None], 1)[:, 0])

    def chunked(head, hidden):
        return jnp.sum(weight * logprobs.head_logprobs(head, hidden[None], target[None], IDS, 0.7, 4)[0])

    expected = jax.grad(plain, (0, 1))(head, hidden)
    chex.assert_trees_all_close(jax.grad(chunked, (0, 1))(head, hidden), expected, atol=1e-5)


@pytest.mark.parametrize("size", [8, 4, 1])
def test_micro_batches_give_the_same_update(size):
    whole, split = one_update(), one_update(micro_batch=size)
    chex.assert_trees_all_close(split[1].loss, whole[1].loss, rtol=1e-5)
    chex.assert_trees_all_close(split[1].grad_norm, whole[1].grad_norm, rtol=1e-5)
    chex.assert_trees_all_close(split[1].diagnostics, whole[1].diagnostics, atol=1e-5)
    chex.assert_trees_all_close(split[0].moments, whole[0].moments, rtol=1e-3, atol=1e-7)


def test_one_cpu_takes_a_divisor_of_the_rows_that_its_caches_hold():
    alone = {(32, 192): 8, (128, 96): 16, (6, 700): 2, (7, 600): 1, (4, 5000): 1, (16, 12): 16}
    assert {(rows, T): learner._cached_rows(rows, 8, T - 8, 1)[0] for rows, T in alone} == alone
    groups = {  # (rows, prompt, response, group): (rows, group)
        (128, 32, 64, 8): (16, 8), (256, 64, 16, 8): (64, 8), (64, 300, 1200, 8): (1, 1), (64, 300, 700, 8): (2, 2),
        (24, 100, 300, 6): (6, 6),
    }  # fmt: skip
    assert {case: learner._cached_rows(*case) for case in groups} == groups


@pytest.mark.parametrize("remat", ["none", "dots", "full"])
def test_what_is_computed_again_changes_no_update(remat):
    """Scanned and recomputed, as on a mesh, or unrolled and kept, as on one CPU."""
    mesh = make_mesh(MeshConfig(), jax.devices()[:1])
    graphdef, _, _ = models.abstract(CONFIG)
    params = models.init(CONFIG, jax.random.key(0))
    found = []
    for policy in ("auto", remat):
        programs = learner.build(forward(graphdef, remat=policy), AGENT, OBJECTIVE, 0, mesh, 10)
        state, outcome = programs.update(programs.init(jax.tree.map(jnp.copy, params)), batch(), jnp.int32(1))
        found.append((state.moments, outcome.loss))
    chex.assert_trees_all_close(*found, rtol=1e-3, atol=1e-7)


@pytest.mark.parametrize("size", [2, 0])
def test_packed_rows_give_the_same_update_and_scores(size):
    padded, packed = one_update(), one_update(packing=True, micro_batch=size)
    chex.assert_trees_all_close(packed[1].loss, padded[1].loss, rtol=1e-5)
    chex.assert_trees_all_close(packed[1].grad_norm, padded[1].grad_norm, rtol=1e-5)
    chex.assert_trees_all_close(packed[1].entropy, padded[1].entropy, rtol=1e-5)
    chex.assert_trees_all_close(packed[0].moments, padded[0].moments, rtol=1e-3, atol=1e-7)
    assert packed[1].diagnostics.valid.sum() == padded[1].diagnostics.valid.sum() == M - 1

    graphdef, _, _ = models.abstract(CONFIG)
    params, mesh = models.init(CONFIG, jax.random.key(0)), make_mesh(MeshConfig(), jax.devices()[:1])
    agent = AGENT.model_copy(update={"packing": True, "micro_batch": size})
    score = learner.build(forward(graphdef), agent, OBJECTIVE, 0, mesh, 10).score(params, batch())
    expected, _ = learner.token_logprobs(forward(graphdef), params, batch())
    chex.assert_trees_all_close(score, expected, atol=1e-5)


@pytest.mark.parametrize("group, size", [(4, 0), (2, 8), (4, 2)])
@pytest.mark.parametrize("remat", ["none", "dots"])
def test_a_shared_prompt_gives_the_same_update_and_scores(group, size, remat):
    """Computed once for its answers: unrolled and scanned; a micro-batch may hold half of a group."""
    alone, shared = one_update(), one_update(group=group, micro_batch=size, remat=remat)
    chex.assert_trees_all_close(shared[1].loss, alone[1].loss, rtol=1e-5)
    chex.assert_trees_all_close(shared[1].grad_norm, alone[1].grad_norm, rtol=1e-5)
    chex.assert_trees_all_close(shared[1].entropy, alone[1].entropy, rtol=1e-5)
    chex.assert_trees_all_close(shared[1].diagnostics, alone[1].diagnostics, atol=1e-5)
    chex.assert_trees_all_close(shared[0].moments, alone[0].moments, rtol=1e-3, atol=1e-7)

    graphdef, _, _ = models.abstract(CONFIG)
    params, mesh = models.init(CONFIG, jax.random.key(0)), make_mesh(MeshConfig(), jax.devices()[:1])
    agent = AGENT.model_copy(update={"micro_batch": size, "remat": remat})
    score = learner.build(forward(graphdef, group=group), agent, OBJECTIVE, 0, mesh, 10).score(params, batch())
    expected, _ = learner.token_logprobs(forward(graphdef), params, batch())
    chex.assert_trees_all_close(score, expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(5))
def test_packing_keeps_every_token_and_little_padding(seed):
    rng, T, N = np.random.default_rng(seed), 256, 64
    lengths = np.minimum(rng.geometric(1 / 60, N), T) * (rng.random(N) < 0.9)
    places = jax.jit(packing.place, static_argnums=1)(jnp.asarray(lengths, jnp.int32), T)
    cover = np.zeros((N, T), int)
    slots = set()
    for i in np.flatnonzero(lengths):
        row, offset, slot = int(places.row[i]), int(places.offset[i]), int(places.slot[i])
        cover[row, offset : offset + lengths[i]] += 1
        assert offset + lengths[i] <= T and (row, slot) not in slots and slot < packing.slots_of(T)
        slots.add((row, slot))
    assert cover.max() == 1 and cover.sum() == lengths.sum()
    assert int(places.used) == np.any(cover, axis=1).sum() and np.all(np.any(cover, axis=1)[: int(places.used)])
    assert lengths.sum() >= 0.9 * int(places.used) * T or int(places.used) * T - lengths.sum() < T


@pytest.fixture(scope="module")
def alone():
    return updates(3, optimizer=UNCLIPPED)


MESHES = [(1, 8, 1), (1, 4, 2), (1, 2, 4), (1, 1, 8), (8, 1, 1), (2, 2, 2)]  # data, fsdp, tensor


@pytest.mark.parametrize(
    "rows",
    [
        {},
        pytest.param({"packing": True, "micro_batch": 8}, marks=pytest.mark.slow),
        pytest.param({"group": GROUP}, marks=pytest.mark.slow),
    ],
    ids=["padded", "packed", "shared"],
)
@pytest.mark.parametrize("shape", MESHES, ids=str)
def test_meshes_give_the_same_gradients_and_parameters(alone, shape, rows):
    mesh = make_mesh(MeshConfig(**dict(zip(("data", "fsdp", "tensor"), shape, strict=True))))
    many = updates(3, mesh, optimizer=UNCLIPPED, **rows)
    chex.assert_trees_all_close(many[0][1].loss, alone[0][1].loss, rtol=1e-5)
    chex.assert_trees_all_close(many[0][1].grad_norm, alone[0][1].grad_norm, rtol=1e-5)
    # Without clipping the first moment is a tenth of the first gradient.
    for ours, theirs in zip(*(jax.tree.leaves(each[0][0].moments[1].mu) for each in (many, alone)), strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    chex.assert_trees_all_close(many[2][0].trainable, alone[2][0].trainable, atol=0.1 * UNCLIPPED.lr)


def test_own_ratio_is_exactly_one_at_the_first_update():
    _, first = one_update(m=0)
    own = np.asarray(batch().source[:, 0] == 0)
    assert np.all(first.diagnostics.ratio[own] == 1.0)
    _, second = one_update(m=1)
    assert np.any(second.diagnostics.ratio[own] != 1.0)


def test_a_nonfinite_gradient_changes_nothing_but_the_clock():
    before = jax.device_get(models.init(CONFIG, jax.random.key(0)))
    state, outcome = one_update(poison=True)
    assert outcome.nonfinite
    assert state.updates == 1
    chex.assert_trees_all_equal(state.trainable, before)
    assert all(not np.any(leaf) for leaf in jax.tree.leaves(state.moments))


def test_lora_moves_only_its_adapters():
    lora = LoraConfig(rank=2, alpha=4.0)
    before = jax.device_get(models.init(CONFIG, jax.random.key(0), lora))
    state, _ = updates(2, lora=lora)[-1]
    _, frozen = learner.split(before)
    chex.assert_trees_all_equal(state.frozen, frozen)
    moved = jax.tree.map(lambda a, b: bool(np.any(a != b)), state.trainable, learner.split(before)[0])
    assert any(jax.tree.leaves(moved))


def test_schedule_clock():
    _, rate = learner.make_optimizer(OptimizerConfig(lr=1.0, schedule="linear", warmup_steps=2), 6)
    assert [round(float(rate(jnp.asarray(i))), 6) for i in range(7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    _, constant = learner.make_optimizer(OptimizerConfig(lr=3e-6), 6)
    assert float(constant(jnp.asarray(5))) == pytest.approx(3e-6)
