"""The walls of the house: who may import whom, and what may not occur anywhere (docs/architecture.md)."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import hacrl_jax

PACKAGE = Path(hacrl_jax.__file__).parent
FILES = sorted(PACKAGE.rglob("*.py"))
LEVELS = (
    {"types", "presets", "mistakes", "config", "metrics"},
    {"hacpo", "diagnostics", "groups", "hosts", "logprobs", "topology", "sharding", "tokenizer", "tasks", "models"},
    {"sampler", "learner", "exchange", "estimate", "checkpoint", "archive", "guard", "mirror", "packing", "pairing"},
    {"agent", "measures", "results", "evaluate", "journal", "resuming"},
    {"algorithm", "doctor", "export", "frame", "generate", "plan", "replay", "report", "serving"},
    {"cli", "cli_answers"},
)
ONLY = {  # rooms that know less than their level allows
    "types": set(),
    "config": {"types", "presets", "mistakes"},
    "metrics": {"types", "config"},
    "hacpo": {"types", "config"},
    "groups": {"types", "config", "hacpo"},
    "logprobs": {"types", "sharding"},
    "diagnostics": {"types", "config", "hacpo"},
    "models": {"types", "config", "sharding"},
    "sampler": {"types", "config", "sharding", "models"},
}
FORBIDDEN_MODULES = {"pickle", "cloudpickle", "dill", "shelve", "marshal"}
FORBIDDEN_CALLS = {"eval", "exec", "parse_expr", "__import__"}


def room(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def imports(path: Path) -> set[str]:
    """Every absolute module name that a file imports, lazily or not; `from a import b` gives a and a.b."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: relative import"
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def rooms_imported(path: Path) -> set[str]:
    known = {name for level in LEVELS for name in level}
    parts = [name.split(".") for name in imports(path)]
    return {part[1] for part in parts if part[0] == "hacrl_jax" and len(part) > 1 and part[1] in known} - {room(path)}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_lower_rooms_never_import_higher_ones(path):
    name = room(path)
    if name == "__init__":
        return
    level = next((index for index, names in enumerate(LEVELS) if name in names), None)
    assert level is not None, f"{name} has no level: give it one here and in docs/architecture.md"
    allowed = ONLY.get(name, set().union(*LEVELS[: level + 1]))
    assert rooms_imported(path) <= allowed


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(PACKAGE)))
def test_house_rules(path):
    text = path.read_text("utf-8")
    assert text.count("\n") <= 400, "split the file"
    if room(path) != "models":
        assert not any(name.startswith("flax.nnx") for name in imports(path)), "nnx stays in models/"
    assert not FORBIDDEN_MODULES & {name.split(".")[0] for name in imports(path)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = node.end_lineno - node.lineno + 1
            assert length <= 70, f"{node.name} has {length} lines"
        if isinstance(node, ast.Call):
            name = getattr(node.func, "id", None)
            assert name not in FORBIDDEN_CALLS, f"line {node.lineno} calls {name}"


def test_a_command_line_for_help_does_not_wait_for_jax():
    code = "import sys, hacrl_jax.cli; sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'transformers')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
