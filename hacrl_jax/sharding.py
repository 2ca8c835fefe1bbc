"""The mesh, and the one table that maps logical axes to it.

Every parameter declares its logical axes where it is defined (models/decoder.py); everything else that lives on the
mesh (rows of rollouts, decode slots, the cache) uses ``spec`` with the same names.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hacrl_jax.config import Config, MeshConfig
from hacrl_jax.types import UserError

AXES = ("data", "fsdp", "tensor")

RULES: dict[str, str | tuple[str, ...]] = {
    "batch": ("data", "fsdp"),  # rows of a minibatch, decode slots
    "sequence": "tensor",  # tokens of the activations between two blocks, which all tensor devices would else repeat
    "replica": "data",  # devices with equal parameters
    "embed": "fsdp",  # the hidden axis of parameters: gathered layer by layer
    "vocab": "tensor",
    "heads": "tensor",
    "kv_heads": "tensor",
    "mlp": "tensor",
}


def make_mesh(config: MeshConfig, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with axes (data, fsdp, tensor). One size may be -1 and takes what the others leave; without one, a single
    process may name fewer devices than there are, and gets the first.

    The axes are Auto: shardings are placed where arrays are made and propagated by the compiler. Raises UserError when
    the sizes do not make the devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    known = math.prod(size for size in sizes if size > 0)
    if sizes.count(-1) > 1 or any(size == 0 or size < -1 for size in sizes):
        raise UserError(f"mesh: sizes {dict(zip(AXES, sizes, strict=True))} must be positive, at most one of them -1")
    if -1 in sizes:
        sizes[sizes.index(-1)] = len(devices) // known
    elif jax.process_count() == 1:
        devices = devices[:known]
    if math.prod(sizes) != len(devices):
        shape = " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))
        raise UserError(f"mesh: {shape} does not make the {len(devices)} devices of this machine")
    return Mesh(np.asarray(devices).reshape(sizes), AXES)


def agent_mesh(config: Config, index: int, mesh: Mesh) -> Mesh:
    """The mesh of one agent: the run's, or all of its devices along the agent's own axes (UserError: fewer)."""
    own = config.agents[index].mesh
    if own is None:
        return mesh
    made = make_mesh(own, list(mesh.devices.flat))
    if made.size != mesh.size:
        raise UserError(f"agents.{index}.mesh: it has {made.size} of the run's {mesh.size} devices; agents share all")
    return made


def check_agents(config: Config, mesh: Mesh) -> None:
    """Raise UserError for agents that this mesh cannot train: devices along data and fsdp that do not divide their
    (micro-)batch, or the TPU's attention kernel elsewhere."""
    kind = mesh.devices.flat[0].platform
    for index, agent in enumerate(config.agents):
        own = agent_mesh(config, index, mesh)
        parts = own.shape["data"] * own.shape["fsdp"]
        rows = agent.micro_batch or config.minibatch * config.rollout.samples
        if rows % parts:
            what = f"micro_batch {rows}" if agent.micro_batch else f"minibatch of {rows} sequences"
            raise UserError(f"mesh: data x fsdp = {parts} devices do not divide the {what} of agent {agent.name}")
        if agent.attention == "splash" and kind != "tpu":
            raise UserError(f"agents.{index}.attention: splash is a kernel for TPU, and this machine's devices are "
                            f"{kind}; set agents.{index}.attention=xla")  # fmt: skip


def spec(*axes: str | None) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes; None (or a name without a rule) is replicated."""
    return PartitionSpec(*(RULES.get(axis) if axis is not None else None for axis in axes))


def sharding(mesh: Mesh, *axes: str | None, shape: tuple[int, ...] | None = None) -> NamedSharding:
    """Where an array with these logical axes lies. With a shape, an axis whose size the mesh does not divide (a small
    model's two kv heads on four tensor devices) is replicated instead."""
    parts = list(spec(*axes))
    for i, part in enumerate(parts):
        names = (part,) if isinstance(part, str) else part or ()
        if shape is not None and shape[i] % math.prod(mesh.shape[name] for name in names):
            parts[i] = None
    return NamedSharding(mesh, PartitionSpec(*parts))


def shardings(axes: Any, mesh: Mesh, shapes: Any = None) -> Any:
    """A tree of NamedSharding from a tree whose leaves are tuples of logical axes; shapes, where given, is the same
    tree of arrays or ShapeDtypeStructs."""
    is_axes = lambda leaf: isinstance(leaf, tuple)  # noqa: E731
    if shapes is None:
        return jax.tree.map(lambda leaf: sharding(mesh, *leaf), axes, is_leaf=is_axes)
    return jax.tree.map(lambda leaf, array: sharding(mesh, *leaf, shape=array.shape), axes, shapes, is_leaf=is_axes)


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """x laid out by its logical axes where a mesh is set (jax.set_mesh), else x as it is.

    An axis that the mesh does not divide is replicated.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return x if mesh.empty else jax.lax.with_sharding_constraint(x, sharding(mesh, *axes, shape=x.shape))


def parts(axis: str, size: int) -> int:
    """Among how many devices a logical axis of this size is split where a mesh is set (jax.set_mesh), else 1."""
    mesh = jax.sharding.get_abstract_mesh()
    names = None if mesh.empty else sharding(mesh, axis, shape=(size,)).spec[0]
    return math.prod(mesh.shape[name] for name in ((names,) if isinstance(names, str) else names or ()))


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec())
