"""Does it fit? The bytes of a run on each chip of a TPU topology, from the TPU's compiler, before anyone rents one.

Every agent's update, score, prefill and decode are compiled at the config's shapes for the named topology (topology.py;
no TPU is needed). Arrays that live across programs are counted from their shardings, temporaries come from the
compiler. Without libtpu the temporaries are an estimate, and say so.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from huggingface_hub import hf_hub_download
from jax.sharding import AbstractMesh, AxisType, Mesh

from hacrl_jax import agent, estimate, models, sharding, topology
from hacrl_jax.config import Config, MeshConfig
from hacrl_jax.models.published import published
from hacrl_jax.topology import GIB, Compiled, Topology
from hacrl_jax.types import Minibatch, UserError

ARRAYS = ("parameters", "moments", "sampler copy", "reference")
KINDS = (*ARRAYS, "cache", "buffer", "temporaries")
ESTIMATED = "ESTIMATE: temporaries by arithmetic, no compiler asked; pip install 'hacrl_jax[tpu]' brings libtpu (Linux)"
CACHE = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "hacrl_jax" / "plan"


@dataclass(frozen=True)
class AgentPlan:
    """One agent's bytes per chip: arrays that stay, and its programs. host: what waits in host memory between turns."""

    name: str
    arrays: dict[str, int]
    host: dict[str, int]
    programs: dict[str, Compiled]


@dataclass(frozen=True)
class Phase:
    """A phase of the loop: bytes per chip by kind, all agents' together."""

    name: str
    agent: str
    bytes: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Plan:
    topology: Topology
    estimated: bool
    agents: tuple[AgentPlan, ...]
    phases: tuple[Phase, ...]
    advice: tuple[str, ...] = field(default=())

    @property
    def peak(self) -> Phase:
        return max(self.phases, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        return self.peak.total <= self.topology.hbm and not self.errors

    @property
    def errors(self) -> list[str]:
        return [f"{one.name} {name}: {program.error}" for one in self.agents
                for name, program in one.programs.items() if program.error]  # fmt: skip


def plan(config: Config, name: str, *, cache: Path | None = CACHE, analytic: bool = False,
         say: Callable[[str], None] = lambda _: None) -> Plan:  # fmt: skip
    """The plan of a config on a topology such as v5e:4x4.

    analytic, or libtpu absent: no program is compiled, temporaries are estimated. Raises UserError for a topology that
    does not exist, a mesh that does not fit it or its agents, or a model whose shape cannot be found.
    """
    where = topology.parse(name)
    estimated = analytic or topology.libtpu() is None
    everywhere = None if estimated else sharding.make_mesh(config.mesh, topology.devices(where))
    if everywhere is not None:
        sharding.check_agents(config, everywhere)
    agents = []
    for index in range(len(config.agents)):
        mesh = _abstract_mesh(config, index, where) if estimated else sharding.agent_mesh(config, index, everywhere)
        with jax.set_mesh(mesh) if isinstance(mesh, Mesh) else jax.sharding.use_abstract_mesh(mesh):
            agents.append(_agent(config, index, mesh, where, estimated, cache, say))
    phases = tuple(_phases(config, agents))
    draft = Plan(where, estimated, tuple(agents), phases)
    return draft if draft.fits else Plan(where, estimated, tuple(agents), phases, tuple(_advice(config, draft)))


def shape(model: str, revision: str | None) -> models.DecoderConfig:
    """The shape of a model: from its folder, the hub's cache, the table of published models, or the hub."""
    if Path(model).expanduser().is_dir():
        return models.read_config(Path(model).expanduser())
    offline = {"repo_id": model, "filename": "config.json", "revision": revision}
    try:
        return models.read_config(Path(hf_hub_download(**offline, local_files_only=True)).parent)
    except (OSError, ValueError):
        if known := published(model):
            return known
    try:
        return models.read_config(Path(hf_hub_download(**offline)).parent)
    except (OSError, ValueError) as error:
        line = " ".join(str(error).split())[:200]
        raise UserError(f"model {model}: no such folder, and the hub gave no config.json of it: {line}") from None


def _agent(config: Config, index: int, mesh: Any, where: Topology, estimated: bool, cache: Path | None,
           say: Callable[[str], None]) -> AgentPlan:  # fmt: skip
    settings = config.agents[index]
    model = shape(settings.model, settings.revision)
    graphdef, params, axes = models.abstract(model, settings.lora)
    params = jax.tree.map(_placed, params, sharding.shardings(axes, mesh, params))
    dtype = jnp.dtype("bfloat16" if settings.dtype == "auto" else settings.dtype)
    learner, engine = agent.build(config, index, graphdef, model, params, model.vocab_size, (0,), dtype, mesh, 1)
    state = learner.abstract(params)
    sampler = engine.abstract(params)
    copy, cached = sampler["decode"][1][0], sampler["decode"][1][1].cache
    arrays = {
        "parameters": bytes_of(params), "moments": bytes_of(state.moments), "sampler copy": bytes_of(copy),
        "reference": bytes_of(jax.tree.map(lambda x: _placed(x, x.sharding, dtype), state.trainable))
        if config.objective.kl_coefficient else 0,
        "cache": bytes_of(cached),
    }  # fmt: skip
    away = {"none": (), "moments": ("moments",), "all": ARRAYS}[settings.offload]
    if estimated:
        programs = estimate.programs(config, index, model, mesh)
    else:
        rows = minibatch(config, mesh)
        count = jax.ShapeDtypeStruct((), jnp.int32)
        named = {"update": (learner.update, (state, rows, count)), "score": (learner.score, (params, rows)), **sampler}
        programs = {}
        for name, (function, arguments) in named.items():
            say(f"compiling {name} of {settings.name} for {where.name}")
            programs[name] = topology.compile(function.lower(*arguments), where, cache)
    return AgentPlan(settings.name, arrays, {kind: arrays[kind] for kind in away}, programs)


def minibatch(config: Config, mesh: Any, rows: int = 0) -> Minibatch:
    """The rows of an update (or so many) as abstract arrays, replicated like those that the exchange makes."""
    rows = rows or config.minibatch * config.rollout.samples
    width = config.rollout.max_prompt + config.rollout.max_response
    everywhere = sharding.replicated(mesh)
    whole = lambda dtype: jax.ShapeDtypeStruct((rows, width), dtype, sharding=everywhere)  # noqa: E731
    each = lambda dtype: jax.ShapeDtypeStruct((rows, 1), dtype, sharding=everywhere)  # noqa: E731
    return Minibatch(
        tokens=whole(jnp.int32), positions=whole(jnp.int32), segment=whole(jnp.int32), scored=whole(jnp.bool_),
        source_token_logprob=whole(jnp.float32), sampler_token_logprob=whole(jnp.float32),
        reference_token_logprob=whole(jnp.float32), source_logprob=each(jnp.float32), advantage=each(jnp.float32),
        capability_ratio=each(jnp.float32), source=each(jnp.int32), valid=each(jnp.bool_),
    )  # fmt: skip


def record(found: Plan) -> dict[str, Any]:
    """The plan as one JSON object; bytes per chip."""
    return {
        "topology": found.topology.name, "chips": found.topology.chips, "hbm": int(found.topology.hbm),
        "fits": found.fits, "estimated": found.estimated, "peak": found.peak.total, "advice": found.advice,
        "agents": [
            {"name": one.name, "bytes": one.arrays, "host": one.host,
             "programs": {name: asdict(program) for name, program in one.programs.items()}}
            for one in found.agents
        ],
        "phases": [{"phase": one.name, "agent": one.agent, "bytes": one.bytes, "total": one.total}
                   for one in found.phases],
    }  # fmt: skip


def table(found: Plan) -> str:
    """The plan for people: programs, phases, the verdict, and what to change."""
    where = found.topology
    lines = [f"{where.name}: {where.chips} chips with {where.hbm / GIB:.2f} GiB each; GiB per chip", ""]
    if found.estimated:
        lines.insert(0, ESTIMATED)
    lines.append(f"{'agent':24} {'program':9} {'temporary':>9} {'code':>6} {'compiled':>9}  collectives, GB")
    for one in found.agents:
        for name, program in one.programs.items():
            moved = "  ".join(f"{kind} {size / 1e9:.2f}" for kind, size in sorted(program.collectives.items()))
            clock = "estimate" if found.estimated else "cached" if program.cached else f"{program.seconds:.0f} s"
            lines.append(f"{one.name:24} {name:9} {program.temporaries / GIB:9.2f} {program.code / GIB:6.2f} "
                         f"{clock:>9}  {program.error or moved}")  # fmt: skip
    lines += ["", f"{'phase':9} {'agent':24} " + " ".join(f"{kind:>12}" for kind in (*KINDS, "sum"))]
    for phase in found.phases:
        sizes = [*(phase.bytes[kind] for kind in KINDS), phase.total]
        lines.append(f"{phase.name:9} {phase.agent:24} " + " ".join(f"{size / GIB:12.2f}" for size in sizes))
    for one in found.agents:
        if one.host:
            away = ", ".join(f"{kind} {size / GIB:.2f}" for kind, size in one.host.items())
            lines.append(f"in host memory between turns, per chip: {one.name}, {away}")
    peak = found.peak
    needs = f"{peak.total / GIB:.2f} of {where.hbm / GIB:.2f} GiB per chip in {peak.name} of {peak.agent}"
    lines += ["", f"{'fits' if found.fits else 'does not fit'}: {needs}"]
    if found.advice:
        lines.append(f"change: {', or '.join(found.advice)}")
    return "\n".join(lines)


def bytes_of(tree: Any) -> int:
    """Bytes of a tree of abstract arrays on one chip."""
    return sum(math.prod(x.sharding.shard_shape(x.shape)) * _size(x.dtype) for x in jax.tree.leaves(tree))


def _phases(config: Config, agents: list[AgentPlan]) -> list[Phase]:
    """What lies on a chip in each turn of the loop; every agent's arrays lie there always unless they wait outside."""
    rollout, n = config.rollout, len(agents)
    samples = rollout.prompts * rollout.samples
    answers = samples * rollout.max_response * 8  # ids and log-probs, replicated
    scores = samples * rollout.max_response * 4
    mesh = AbstractMesh((1,), ("data",), axis_types=(AxisType.Auto,))
    rows = lambda count: bytes_of(minibatch(config, mesh, count))  # noqa: E731
    part = rows(0)
    shared = 1 if config.objective.cross == "none" else n
    phases = []
    for turn, one in enumerate(agents):
        sampling = max(_extra(one.programs[name]) for name in ("prefill", "decode"))
        cache, buffer = one.arrays["cache"], answers * (turn + 1)
        phases.append(_phase("generate", one, agents, cache, buffer, sampling, ("sampler copy",)))
    for one in agents:
        buffer = n * (answers + scores) + rows(samples) + part
        phases.append(_phase("score", one, agents, 0, buffer, _extra(one.programs["score"]), ("parameters",)))
    for one in agents:
        buffer = n * (answers + scores) + rows(shared * samples) + part
        reference = one.host.get("reference", 0)  # fetched for its scores, then gone again
        extra = max(_extra(one.programs["update"]), _extra(one.programs["score"]) + reference)
        phases.append(_phase("update", one, agents, 0, buffer, extra, ("parameters", "moments")))
    return phases


def _phase(name: str, one: AgentPlan, agents: list[AgentPlan], cache: int, buffer: int, temporaries: int,
           fetched: tuple[str, ...]) -> Phase:  # fmt: skip
    found = dict.fromkeys(KINDS, 0)
    for other in agents:
        for kind in ARRAYS:
            here = kind not in other.host or (other is one and kind in fetched)
            found[kind] += other.arrays[kind] if here else 0
    found |= {"cache": cache, "buffer": buffer, "temporaries": temporaries}
    return Phase(name, one.name, found)


def _extra(program: Compiled) -> int:
    """What a program needs beside its arguments."""
    return program.temporaries + program.code + max(program.outputs - program.aliased, 0)


def _advice(config: Config, found: Plan) -> list[str]:
    """Settings whose change makes room where the most is missing, the most promising first."""
    peak = found.peak
    index = next(i for i, one in enumerate(found.agents) if one.name == peak.agent)
    settings, key = config.agents[index], f"agents.{index}"
    parts = dict(zip(sharding.AXES, _sizes(settings.mesh or config.mesh, found.topology), strict=True))
    advice = []
    if peak.name == "generate" and peak.bytes["cache"] >= peak.bytes["temporaries"]:
        advice.append(f"rollout.slots={max(config.rollout.slots or 256, 2) // 2}")
    rows = settings.micro_batch or config.minibatch * config.rollout.samples
    if peak.name != "generate" and rows > parts["data"] * parts["fsdp"]:
        advice.append(f"{key}.micro_batch={max(rows // 2, parts['data'] * parts['fsdp'])}")
    if peak.name == "update" and settings.remat != "full":
        advice.append(f"{key}.remat=full")
    if peak.name != "generate" and settings.attention != "splash":
        advice.append(f"{key}.attention=splash")
    for number, other in enumerate(config.agents):
        following = {"none": "moments", "moments": "all"}.get(other.offload)
        if following:
            advice.append(f"agents.{number}.offload={following}")
    return [*advice, "a larger --topology", *([] if settings.lora else [f"{key}.lora.rank=16"])]


def _sizes(mesh: MeshConfig, where: Topology) -> tuple[int, ...]:
    sizes = [mesh.data, mesh.fsdp, mesh.tensor]
    known = math.prod(size for size in sizes if size > 0)
    sizes = [where.chips // known if size == -1 else size for size in sizes]
    if math.prod(sizes) != where.chips:
        raise UserError(f"mesh: {' x '.join(map(str, sizes))} does not make the {where.chips} chips of {where.name}")
    return tuple(sizes)


def _abstract_mesh(config: Config, index: int, where: Topology) -> AbstractMesh:
    sizes = _sizes(config.agents[index].mesh or config.mesh, where)
    return AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Auto,) * 3)


def _placed(x: Any, place: Any, dtype: Any = None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype if dtype is None else dtype, sharding=place)


def _size(dtype: Any) -> int:
    return 8 if jnp.issubdtype(dtype, jax.dtypes.prng_key) else jnp.dtype(dtype).itemsize
