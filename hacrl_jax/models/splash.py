"""The TPU's splash attention kernel (jax.experimental.pallas.ops.tpu.splash_attention) for rows of any length."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as kernel
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as masks
from jax.sharding import PartitionSpec

from hacrl_jax import sharding
from hacrl_jax.types import Array

LANES = 128  # rows are padded to a multiple of it
BLOCKS = (512, 384, 256, LANES)  # tokens per tile: the largest that pads a row by an eighth at most


def causal(q: Array, k: Array, v: Array, segment: Array | None, *, interpret: bool = False) -> Array:
    """attention.causal by the kernel: never a [T, T] array, and blocks above the diagonal are skipped.

    q [B, T, H, h]; k, v [B, T, K, h]; segment [B, T] or None. Returns [B, T, H, h]. The compiler cannot split the
    kernel: on several devices the mesh must be set (jax.set_mesh), so that it runs on each device's rows and heads.
    interpret runs it anywhere, slowly, for tests.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return _local(q, k, v, segment, interpret)
    rows, _, heads, _ = sharding.sharding(mesh, "batch", None, "kv_heads", None, shape=k.shape).spec
    split = PartitionSpec(rows, None, heads, None)  # a query head lies with its kv head
    return jax.shard_map(
        lambda q, k, v, segment: _local(q, k, v, segment, interpret),
        in_specs=(split, split, split, None if segment is None else PartitionSpec(rows, None)),
        out_specs=split,
        check_vma=False,
    )(q, k, v, segment)


def _local(q: Array, k: Array, v: Array, segment: Array | None, interpret: bool) -> Array:
    _, length, heads, h = q.shape
    block = next(block for block in BLOCKS if -length % block <= length // 8 or block == LANES)
    extra = -length % block
    q = (q.astype(jnp.float32) * h**-0.5).astype(q.dtype)  # the kernel does not scale
    # Padding follows the row, so no token attends to it.
    q, k, v = (jnp.pad(jnp.swapaxes(x, 1, 2), ((0, 0), (0, 0), (0, extra), (0, 0))) for x in (q, k, v))
    size = length + extra
    attention = kernel.make_splash_mha(
        masks.MultiHeadMask([masks.CausalMask((size, size))] * heads),
        block_sizes=kernel.BlockSizes(
            block_q=block, block_kv=block, block_kv_compute=block, block_q_dkv=block, block_kv_dkv=block,
            block_kv_dkv_compute=block, block_q_dq=block, block_kv_dq=block,
        ),
        head_shards=1,
        q_seq_shards=1,
        interpret=interpret,
    )  # fmt: skip
    ids = None
    if segment is not None:
        segment = jnp.pad(segment, ((0, 0), (0, extra)))
        ids = kernel.SegmentIds(segment, segment)
    out = jax.vmap(attention)(q, k, v, ids)  # [B, H, T + extra, h]
    return jnp.swapaxes(out, 1, 2)[:, :length]
