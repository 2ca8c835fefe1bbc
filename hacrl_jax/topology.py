"""TPU topologies by name, and what their compiler says of a program, without a TPU.

libtpu (extra `tpu`) compiles for any topology on a CPU machine: ``jax.experimental.topologies`` describes its devices,
and the compiled program knows its bytes on each chip. Answers are kept in a folder by the hash of the program.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import os
import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import jax

from hacrl_jax.types import UserError

GIB = 2**30
HBM = {"v5e": 15.75 * GIB, "v6e": 31.25 * GIB, "v5p": 95.74 * GIB}  # bytes a chip offers, as the compiler states them
COLLECTIVES = ("all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute")
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "f32": 4, "f64": 8}
QUIET = {  # libtpu looks for a TPU and logs that there is none
    "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3",
}  # fmt: skip


@dataclass(frozen=True)
class Topology:
    """chips of one kind; hbm is bytes per chip."""

    name: str
    chips: int
    hbm: float


@dataclass(frozen=True)
class Compiled:
    """A program's bytes on each chip. collectives: bytes of the results by kind, loops of known length counted through.

    error: why it was not compiled, where even alone it needs more memory than a chip has; temporaries are then all
    that it wanted.
    """

    arguments: int
    outputs: int
    aliased: int  # outputs that take an argument's memory
    temporaries: int
    host: int  # arguments and temporaries in host memory
    code: int
    collectives: dict[str, int]
    seconds: float  # of the compiler
    cached: bool = False
    error: str = ""


def parse(name: str) -> Topology:
    """A topology such as v5e:4x4. Raises UserError for another name."""
    match = re.fullmatch(r"(\w+):(\d+(?:x\d+)+)", name)
    if not match or match[1] not in HBM:
        raise UserError(f"--topology: {name!r} is none of {', '.join(f'{kind}:AxB[xC]' for kind in HBM)}")
    return Topology(name, math.prod(map(int, match[2].split("x"))), HBM[match[1]])


def libtpu() -> str | None:
    """The version of libtpu, None where it is not installed."""
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


def devices(topology: Topology) -> Sequence[jax.Device]:
    """The devices of a topology: programs can be compiled for them, not run. Raises UserError where libtpu refuses."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(topology.name, platform="tpu").devices
    except Exception as error:  # jaxlib's own errors, which differ between versions
        line = " ".join(str(error).split())[:200]
        raise UserError(f"--topology {topology.name}: libtpu refuses it: {line}") from None


def compile(lowered: Any, topology: Topology, cache: Path | None = None) -> Compiled:
    """Compile a lowered program (jax.jit(f).lower(...)), or find the answer of an earlier call in the cache."""
    versions = f"{topology.name} libtpu {libtpu()} jaxlib {importlib.metadata.version('jaxlib')}"
    digest = hashlib.sha256((versions + lowered.as_text()).encode()).hexdigest()
    file = cache / f"{digest[:32]}.json" if cache else None
    if file and file.is_file():
        return Compiled(**{**json.loads(file.read_text()), "cached": True})
    start = time.monotonic()
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        found = _too_large(str(error), time.monotonic() - start)
    else:
        found = _read(program, time.monotonic() - start)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(asdict(found)))
        part.replace(file)
    return found


def _read(program: Any, seconds: float) -> Compiled:
    memory = program.memory_analysis()
    return Compiled(
        arguments=memory.argument_size_in_bytes, outputs=memory.output_size_in_bytes,
        aliased=memory.alias_size_in_bytes, temporaries=memory.temp_size_in_bytes,
        host=memory.host_argument_size_in_bytes + memory.host_temp_size_in_bytes,
        code=memory.generated_code_size_in_bytes, collectives=collectives(program.as_text()), seconds=seconds,
    )  # fmt: skip


def _too_large(message: str, seconds: float) -> Compiled:
    wanted = re.search(r"Used ([\d.]+)([KMGT]) of [\d.]+[KMGT] hbm|\(([\d.]+)([KMGT])\) exceeds available HBM", message)
    if "RESOURCE_EXHAUSTED" not in message or not wanted:
        raise RuntimeError(f"the TPU compiler failed: {message[:2000]}")
    number, unit = [part for part in wanted.groups() if part]
    size = int(float(number) * 1024 ** (1 + "KMGT".index(unit)))
    return Compiled(0, 0, 0, size, 0, 0, {}, seconds, error=" ".join(message.split())[:300])


def collectives(text: str) -> dict[str, int]:
    """Bytes that collectives leave on each chip, by kind, from the text of a compiled program.

    A loop whose length is written in its condition counts as often as it turns, another one once. The compiler splits a
    collective over several instructions of one channel: each channel counts once in its computation's surroundings.
    """
    bodies = _computations(text)
    total: Counter[str] = Counter()
    seen: set[tuple[str, str, str]] = set()

    def visit(name: str, times: int, loop: str) -> None:
        for line in bodies.get(name, ()):
            if found := re.search(rf" = (.+?) ({'|'.join(COLLECTIVES)})(-start)?\(", line):
                channel = re.search(r"channel_id=(\d+)", line)
                key = (loop, found[2], channel[1] if channel else line)
                if key not in seen:
                    seen.add(key)
                    total[found[2]] += times * _result_bytes(found[1], started=bool(found[3]))
            elif turn := re.search(r" while\(.*condition=%?([\w.\-]+), body=%?([\w.\-]+)", line):
                visit(turn[2], times * _turns(bodies.get(turn[1], ())), turn[2])
            else:
                for called in re.findall(r"(?:calls|to_apply|true_computation|false_computation)=%?([\w.\-]+)", line):
                    visit(called, times, loop)
                for group in re.findall(r"branch_computations=\{([^}]*)\}", line):
                    for called in group.replace("%", "").split(", "):
                        visit(called, times, loop)

    entry = re.search(r"^ENTRY %?([\w.\-]+)", text, re.MULTILINE)
    if entry:
        visit(entry[1], 1, "")
    return dict(total)


def _computations(text: str) -> dict[str, list[str]]:
    bodies: dict[str, list[str]] = {}
    lines: list[str] = []
    for line in text.splitlines():
        if head := re.match(r"(?:ENTRY )?%?([\w.\-]+) .*\{$", line):
            lines = bodies.setdefault(head[1], [])
        else:
            lines.append(line)
    return bodies


def _turns(condition: Sequence[str]) -> int:
    """How often a loop turns that counts from 0 to a constant; 1 where that is not so."""
    constants = {name: int(value) for line in condition
                 for name, value in re.findall(r"%?([\w.\-]+) = s32\[\]\S* constant\((\d+)\)", line)}  # fmt: skip
    for line in condition:
        if "ROOT" in line and "direction=LT" in line:
            return next((n for name, n in constants.items() if re.search(rf"%?{re.escape(name)}[,)]", line)), 1)
    return 1


def _result_bytes(shape: str, started: bool) -> int:
    """Bytes of an instruction's result; an asynchronous one starts with (operands, results, ...)."""
    sizes = [BYTES.get(kind, 4) * math.prod(int(n) for n in dims.split(",") if n)
             for kind, dims in re.findall(r"(\w+)\[([\d,]*)\]", shape)]  # fmt: skip
    return max(sizes) if started else sum(sizes)
