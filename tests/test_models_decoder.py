"""The decoder's properties: cache, packing, padding, remat, LoRA, sharding, dtypes, the splash kernel."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hacrl_jax import sharding
from hacrl_jax.config import LoraConfig, MeshConfig
from hacrl_jax.models import attention, decoder, splash
from hacrl_jax.models.rope import RopeScaling
from hacrl_jax.types import UserError

QWEN = decoder.DecoderConfig(
    "Qwen3ForCausalLM", 97, 32, 80, 3, 4, 2, 24, 1e-6, 1e6, None, tie_word_embeddings=True, qk_norm=True,
    max_position_embeddings=512,
)  # fmt: skip
LLAMA = decoder.DecoderConfig(
    "LlamaForCausalLM", 97, 32, 80, 2, 4, 1, 8, 1e-5, 5e5, RopeScaling(8.0, 1.0, 4.0, 64), tie_word_embeddings=False,
    qk_norm=False, max_position_embeddings=512,
)  # fmt: skip
# One jitted function for all tests: a program compiled in one serves the others.
APPLY = jax.jit(decoder.apply, static_argnums=0, static_argnames=("dtype", "remat", "attention"))
GRADIENT = jax.jit(
    jax.grad(lambda graphdef, params, tokens, positions, remat: jnp.square(
        decoder.apply(graphdef, params, tokens, positions, remat=remat)[0]
    ).mean(), argnums=1), static_argnums=(0, 4),
)  # fmt: skip
LORA = LoraConfig(rank=3, alpha=6.0, targets=("q_proj", "up_proj"))


def make(config, lora=None):
    """(graphdef, params with matrices wide enough for attention to matter)."""
    params = decoder.init(config, jax.random.key(0), lora)
    return decoder.abstract(config, lora)[0], jax.tree.map(lambda x: 6 * x if x.ndim > 1 and x.min() < 0 else x, params)


def rows(b, t, seed=0):
    return np.random.default_rng(seed).integers(0, 97, (b, t)), np.broadcast_to(np.arange(t), (b, t))


@pytest.mark.parametrize("config", [QWEN, LLAMA])
@pytest.mark.parametrize("new", [1, 4])
def test_cached_equals_whole(config, new):
    graphdef, params = make(config)
    tokens, positions = rows(3, 20)
    whole, kv = APPLY(graphdef, params, tokens, positions)
    chex.assert_shape(kv, (config.num_hidden_layers, 3, 20, config.num_key_value_heads * config.head_dim))
    length = np.array([0, 5, 16])  # every row continues from its own place
    cache = tuple(jnp.where(jnp.arange(20)[:, None] < length[:, None, None], part, 1e4) for part in kv)
    at = length[:, None] + np.arange(new)
    step, fresh = APPLY(graphdef, params, np.take_along_axis(tokens, at, 1), at, cache=cache, cache_length=length)
    np.testing.assert_allclose(step, np.take_along_axis(whole, at[..., None], 1), atol=2e-5)
    for part, all_of_it in zip(fresh, kv, strict=True):
        np.testing.assert_allclose(part, np.take_along_axis(all_of_it, at[None, ..., None], 2), atol=2e-5)


@pytest.mark.parametrize("config", [QWEN, LLAMA])
@pytest.mark.parametrize("entries", [16, 20, 23])  # 23: no slices of equal size
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_unrolled_attention_is_the_same(config, entries, dtype):
    graphdef, params = make(config)
    tokens, positions = rows(4, entries + 1)
    _, (keys, values) = APPLY(graphdef, params, tokens, positions, dtype=dtype)
    length = np.array([0, 1, 13, entries])
    at = length[:, None]
    live = (jnp.arange(entries)[:, None] < length[:, None, None])[None]
    cache = tuple(jnp.where(live, part[:, :, :entries], 1e4) for part in (keys, values))
    arguments = (graphdef, params, np.take_along_axis(tokens, at, 1), at)
    plain, fresh = APPLY(*arguments, cache=cache, cache_length=length, dtype=dtype)
    cache = (cache[0].swapaxes(2, 3), cache[1])
    ours, same = APPLY(*arguments, cache=cache, cache_length=length, dtype=dtype, attention="unrolled")
    tolerance = 2e-5 if dtype == jnp.float32 else 0.1
    for one, other in zip((ours, *same), (plain, *fresh), strict=True):
        assert one.dtype == other.dtype == dtype
        np.testing.assert_allclose(one.astype(jnp.float32), other.astype(jnp.float32), atol=tolerance)
    with pytest.raises(ValueError, match="one new token"):
        APPLY(graphdef, params, tokens[:, :2], positions[:, :2], cache=cache, cache_length=length,
              attention="unrolled")  # fmt: skip


def test_unstacked_layers_compute_the_same():
    graphdef, params = make(QWEN)
    apart = decoder.unstack(params)
    tokens, positions = rows(2, 8)
    whole, kv = APPLY(graphdef, params, tokens, positions)
    ours, pairs = APPLY(graphdef, apart, tokens, positions)
    np.testing.assert_allclose(ours, whole, atol=2e-5)
    chex.assert_trees_all_close(tuple(zip(*kv, strict=True)), pairs, atol=2e-5)
    length = np.array([7, 4])
    at = length[:, None]
    token = np.take_along_axis(tokens, at, 1)
    step, _ = APPLY(graphdef, apart, token, at, cache=pairs, cache_length=length)
    np.testing.assert_allclose(step, np.take_along_axis(whole, at[..., None], 1), atol=2e-5)


@pytest.mark.parametrize("config", [QWEN, LLAMA])
@pytest.mark.parametrize("segments", [False, True])
def test_queries_are_these_tokens_of_the_whole(config, segments):
    """Stacked layers compute all tokens and take some, unstacked ones compute these alone in their last layer."""
    graphdef, params = make(config)
    tokens, positions = rows(2, 200)  # long enough for attention in blocks
    segment = np.repeat([[1, 2, 0]], 2, axis=0).repeat([90, 70, 40], axis=1) if segments else None
    queries = np.array([[0, 5, 89, 90, 159, 3, 3], [199, 1, 100, 48, 47, 60, 120]])

    def value(params, queries, take):
        hidden, _ = decoder.apply(graphdef, params, tokens, positions, segment=segment, queries=queries)
        hidden = hidden if take is None else jnp.take_along_axis(hidden, take[..., None], 1)
        return jnp.sum(jnp.sin(hidden)), hidden

    gradient = jax.jit(jax.value_and_grad(value, has_aux=True))
    (_, expected), slope = gradient(params, None, queries)
    for form, back in ((params, lambda x: x), (decoder.unstack(params), decoder.stack)):
        (_, found), ours = gradient(form, queries, None)
        np.testing.assert_allclose(found, expected, atol=2e-5)
        chex.assert_trees_all_close(back(ours), slope, rtol=1e-4, atol=2e-5)
    chex.assert_trees_all_equal(decoder.stack(decoder.unstack(params)), params)


@pytest.mark.parametrize("config", [QWEN, LLAMA])
def test_packed_rows_equal_separate_ones(config):
    graphdef, params = make(config)
    tokens, positions = rows(2, 12)
    alone, _ = APPLY(graphdef, params, tokens, positions)
    segment = np.array([[1] * 12 + [2] * 12 + [0] * 5])
    packed = np.concatenate([tokens.reshape(1, -1), np.full((1, 5), 96)], 1)
    places = np.concatenate([positions.reshape(1, -1), np.zeros((1, 5), int)], 1)
    together, _ = APPLY(graphdef, params, packed, places, segment=segment)
    np.testing.assert_allclose(together[0, :24].reshape(2, 12, -1), alone, atol=2e-5)
    assert np.isfinite(together).all()


def test_new_tokens_of_other_segments_are_not_seen():
    graphdef, params = make(QWEN)
    tokens, positions = rows(1, 9)
    _, kv = APPLY(graphdef, params, tokens, positions)
    length = np.array([6])
    full, _ = APPLY(graphdef, params, tokens[:, 6:8], positions[:, 6:8], cache=kv, cache_length=length)
    padded, _ = APPLY(graphdef, params, tokens[:, 6:9], positions[:, 6:9], cache=kv, cache_length=length,
                              segment=np.array([[1, 1, 0]]))  # fmt: skip
    np.testing.assert_allclose(padded[:, :2], full, atol=2e-5)


@pytest.mark.parametrize("remat", ["dots", "full", "offload"])
def test_remat_changes_no_gradient(remat):
    graphdef, params = make(QWEN)
    tokens, positions = rows(2, 10)

    plain, again = (GRADIENT(graphdef, params, tokens, positions, policy) for policy in ("none", remat))
    chex.assert_trees_all_close(plain, again, rtol=1e-4, atol=1e-6)


def test_init_and_trainable_with_lora():
    base, params = decoder.init(QWEN, jax.random.key(3)), decoder.init(QWEN, jax.random.key(3), LORA)
    assert jax.tree.all(decoder.trainable(base))
    marks = decoder.trainable(params)
    blocks = {name for name, part in params["layers"].items() if isinstance(part, dict) and "lora_a" in part}
    assert blocks == set(LORA.targets)
    assert sum(jax.tree.leaves(marks)) == 4
    kernels = jax.tree.map(lambda x: x, params)
    for name in LORA.targets:
        del kernels["layers"][name]["lora_a"], kernels["layers"][name]["lora_b"]
    chex.assert_trees_all_equal(kernels, base)  # the low-rank arrays take nothing from the base's random numbers
    chex.assert_trees_all_equal_shapes_and_dtypes(params, decoder.abstract(QWEN, LORA)[1])
    with pytest.raises(UserError, match="w_proj"):
        decoder.abstract(QWEN, LoraConfig(targets=("w_proj",)))


def test_lora_adds_the_scaled_product():
    graphdef, params = make(QWEN, LORA)
    plain, base = make(QWEN)
    tokens, positions = rows(2, 6)
    np.testing.assert_array_equal(
        APPLY(graphdef, params, tokens, positions)[0], APPLY(plain, base, tokens, positions)[0]
    )
    for name in LORA.targets:
        part = params["layers"][name]
        part["lora_b"] = 0.1 * jax.random.normal(jax.random.key(4), part["lora_b"].shape)
        base["layers"][name]["kernel"] += 2.0 * jnp.einsum("lir,lro->lio", part["lora_a"], part["lora_b"])
    moved = APPLY(graphdef, params, tokens, positions)[0]
    np.testing.assert_allclose(moved, APPLY(plain, base, tokens, positions)[0], atol=2e-5)


@pytest.mark.parametrize("mesh", [MeshConfig(data=2, fsdp=2, tensor=2), MeshConfig(data=1, fsdp=2, tensor=4)])
def test_sharded_equals_one_device(mesh):
    """Also where the mesh does not divide the kv heads (2 on 4 tensor devices)."""
    graphdef, params = make(QWEN)
    mesh = sharding.make_mesh(mesh)
    split = jax.device_put(params, sharding.shardings(decoder.abstract(QWEN)[2], mesh, params))
    tokens, positions = rows(4, 12)
    whole, _ = APPLY(graphdef, params, tokens, positions)
    with jax.set_mesh(mesh):
        ours, parts = APPLY(graphdef, split, tokens, positions)
        np.testing.assert_allclose(ours, whole, atol=2e-5)
        length = np.full(4, 11)
        step, _ = APPLY(graphdef, split, tokens[:, 11:], positions[:, 11:], cache=parts, cache_length=length)
        np.testing.assert_allclose(step, whole[:, 11:], atol=2e-5)
        np.testing.assert_allclose(jax.jit(decoder.logits)(split, ours), decoder.logits(params, whole), atol=5e-5)


def test_dtypes():
    graphdef, params = make(LLAMA)
    tokens, positions = rows(1, 5)
    hidden, kv = APPLY(graphdef, params, tokens, positions, dtype=jnp.bfloat16)
    assert {hidden.dtype, kv[0].dtype, kv[1].dtype} == {jnp.dtype(jnp.bfloat16)}
    assert decoder.logits(params, hidden).dtype == jnp.float32
    half = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)  # the sampler's copy
    np.testing.assert_array_equal(APPLY(graphdef, half, tokens, positions, dtype=jnp.bfloat16)[0], hidden)
    assert decoder.head(params) is params["head"] and "head" not in decoder.abstract(QWEN)[1]


def test_depth_does_not_grow_the_program():
    def size(layers):
        from dataclasses import replace

        config = replace(QWEN, num_hidden_layers=layers)
        graphdef, params, _ = decoder.abstract(config)
        ints = jax.ShapeDtypeStruct((1, 8), jnp.int32)
        return len(str(jax.make_jaxpr(partial(decoder.apply, graphdef))(params, ints, ints)).splitlines())

    assert size(2) == size(40)


def test_graphdef_is_a_static_argument():
    assert hash(decoder.abstract(QWEN)[0]) == hash(decoder.abstract(QWEN)[0])
    assert decoder.abstract(QWEN)[0] == decoder.abstract(QWEN)[0] != decoder.abstract(LLAMA)[0]


@pytest.mark.slow
@pytest.mark.parametrize(("t", "h"), [(200, 64), (100, 128), (513, 128)])
@pytest.mark.parametrize("packed", [False, True])
def test_splash_equals_xla(t, h, packed):
    q, k, v, weight = (jax.random.normal(jax.random.key(i), (2, t, heads, h)) for i, heads in enumerate((4, 2, 2, 4)))
    segment = None
    if packed:
        segment = np.where(np.arange(t) < t // 3, 1, np.where(np.arange(t) < t - 9, 2, 0)) * np.ones((2, 1), int)
        weight *= (segment != 0)[..., None, None]

    def loss(attend, q, k, v):
        return jnp.sum(attend(q, k, v, segment) * weight)

    kernel = partial(splash.causal, interpret=True)
    (value, gradient), (expected, gradient_expected) = (
        jax.jit(jax.value_and_grad(partial(loss, f), (0, 1, 2)))(q, k, v) for f in (kernel, attention.causal)
    )
    np.testing.assert_allclose(value, expected, atol=1e-3, rtol=1e-4)
    chex.assert_trees_all_close(gradient, gradient_expected, atol=2e-5, rtol=1e-4)


def test_splash_splits_over_a_mesh():
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=1, tensor=2), jax.devices()[:4])
    q, k, v = (jax.random.normal(jax.random.key(i), (2, 60, heads, 16)) for i, heads in enumerate((4, 2, 2)))
    with jax.set_mesh(mesh):
        ours = jax.jit(partial(splash.causal, segment=None, interpret=True))(q, k, v)
    np.testing.assert_allclose(ours, attention.causal(q, k, v, None), atol=1e-5)
