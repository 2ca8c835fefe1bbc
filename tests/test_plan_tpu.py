"""What the TPU's compiler says of presets' decode programs, and of splash attention at lengths that fit no block."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from hacrl_jax import agent, models, plan, sharding, topology
from hacrl_jax.config import MeshConfig, load
from hacrl_jax.models import splash

PRESET = Path(__file__).parent.parent / "configs" / "paper" / "qwen3_1_7b_and_llama3_2_1b.yaml"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(topology.libtpu() is None, reason="libtpu is absent: pip install 'hacrl_jax[tpu]' brings it"),
]


@pytest.mark.parametrize("index, head_dim", [(0, 128), (1, 64)])
def test_decode_needs_little_memory_beside_the_cache(index, head_dim):
    """At a preset's shapes on v5e: temporaries below a tenth of the cache, and no weights are gathered."""
    config, where = load(PRESET), topology.parse("v5e:4x4")
    model = plan.shape(config.agents[index].model, None)
    assert model.head_dim == head_dim
    mesh = sharding.make_mesh(config.mesh, topology.devices(where))
    with jax.set_mesh(mesh):
        graphdef, shapes, axes = models.abstract(model)
        places = sharding.shardings(axes, mesh, shapes)
        params = jax.tree.map(lambda x, at: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=at), shapes, places)
        _, engine = agent.build(
            config, index, graphdef, model, params, model.vocab_size, (0,), jnp.dtype("bfloat16"), mesh, 1
        )
        decode, arguments = engine.abstract(params)["decode"]
        found = topology.compile(decode.lower(*arguments), where)
    cache, copy = plan.bytes_of(arguments[1].cache), plan.bytes_of(arguments[0])
    print(f"head_dim {head_dim}: temporaries {found.temporaries / cache:.1%} of a cache of {cache / 2**30:.2f} GiB")
    assert found.temporaries < cache / 10
    assert found.collectives["all-gather"] < copy / 10


@pytest.mark.parametrize("length, head_dim", [(213, 64), (1000, 128), (2500, 64)])
def test_splash_compiles_forward_and_backward_at_any_length(length, head_dim):
    where = topology.parse("v5e:2x2")
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2), topology.devices(where))

    def struct(*axes, shape, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding.sharding(mesh, *axes, shape=shape))

    q = struct("batch", None, "heads", None, shape=(2, length, 4, head_dim))
    k = struct("batch", None, "kv_heads", None, shape=(2, length, 2, head_dim))
    segment = struct("batch", None, shape=(2, length), dtype=jnp.int32)
    gradient = jax.grad(lambda *x: splash.causal(*x).astype(jnp.float32).sum(), (0, 1, 2))
    with jax.set_mesh(mesh):
        found = topology.compile(jax.jit(gradient).lower(q, k, k, segment), where)
    assert not found.error
    if length > 2000:
        assert found.temporaries < 2 * 2 * length**2  # a chip's two heads: no array of length x length
