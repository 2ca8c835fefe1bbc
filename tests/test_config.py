"""The strict schema: every mistake is one line that says what, where and what to do."""

import re
from pathlib import Path

import pytest

from hacrl_jax.config import PRESETS, Config, dump, load, resolve
from hacrl_jax.types import UserError

RAW = {
    "name": "t",
    "agents": [{"name": "a", "model": "x"}, {"name": "b", "model": "y"}],
    "data": {"source": "arithmetic"},
}
TEXT = "name: t\nagents:\n- {name: a, model: x}\n- {name: b, model: y}\ndata: {source: arithmetic}\n"


@pytest.fixture
def file(tmp_path) -> Path:
    path = tmp_path / "c.yaml"
    path.write_text(TEXT)
    return path


def message(call, *arguments) -> str:
    with pytest.raises(UserError) as caught:
        call(*arguments)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "override, said",
    [
        ("stpes=3", ["stpes", "did you mean steps?"]),
        ("agents.1.optimizer.lrr=1", ["agents.1.optimizer.lrr", "did you mean lr?"]),
        ("objective.capabilty_window=3", ["objective.capabilty_window", "capability_window"]),
        ("objective.ratio=sequences", ["objective.ratio", "'sequence'", "'token'", "'sequences'"]),
        ("steps=three", ["steps", "integer", "'three'"]),
        ("steps=2.5", ["steps", "integer", "2.5"]),
        ("steps=-1", ["steps", "greater than or equal to 0", "-1"]),
        ("steps=true", ["steps", "integer", "True"]),
        ("objective.binary_guard=1", ["objective.binary_guard", "boolean"]),
        ("name=3", ["name", "string", "3"]),
        ("agents=hello", ["agents", "hello"]),
        ("rollout.temperature=0", ["rollout.temperature", "greater than 0"]),
        ("minibatch=48", ["minibatch 48", "rollout.prompts 128"]),
        ("agents.0.micro_batch=7", ["agents.a.micro_batch 7", "512"]),
        ("agents.1.name=a", ["distinct names"]),
        ("preset=hacpoo", ["hacpoo", "hacpo"]),
        ("agents.2.name=c", ["agents"]),
        ("steps", ["key=value"]),
        ("=3", ["key=value"]),
    ],
)
def test_mistakes_are_named(file, override, said):
    text = message(load, file, [override])
    assert all(part in text for part in said), text


def test_all_mistakes_are_told_at_once(file):
    text = message(load, file, ["stpes=3", "seed=x"])
    assert "stpes" in text and "seed" in text


@pytest.mark.parametrize(
    "text, said", [("a: [", "c.yaml"), ("- 1", "mapping"), ("", "missing"), ("name: t", "agents is missing")]
)
def test_broken_files(tmp_path, text, said):
    (tmp_path / "c.yaml").write_text(text)
    assert said in message(load, tmp_path / "c.yaml")


def test_missing_file_and_folder(tmp_path):
    assert "does not exist" in message(load, tmp_path / "none.yaml")
    message(load, tmp_path)


def test_overrides_reach_lists_and_keep_types(file):
    config = load(file, ["agents.1.optimizer.lr=1e-6", "agents.0.lora.rank=4", "data.arithmetic.operations=[+,-]",
                         "agents.0.revision=null", "name=with=equals", "eval.every=5"])  # fmt: skip
    assert (
        config.agents[1].optimizer.lr == 1e-6 and config.agents[0].optimizer.lr == Config(**RAW).agents[0].optimizer.lr
    )
    assert config.agents[0].lora.rank == 4 and config.agents[1].lora is None
    assert config.data.arithmetic.operations == ("+", "-")
    assert config.name == "with=equals" and config.eval.every == 5


def test_an_integer_is_a_float_where_a_float_is_asked(file):
    assert load(file, ["agents.0.optimizer.lr=1"]).agents[0].optimizer.lr == 1.0


@pytest.mark.parametrize("preset", [(), *((name,) for name in PRESETS), ("authors", "gspo")])
def test_dump_reads_back_equal(tmp_path, preset):
    config = resolve(RAW | {"preset": list(preset)})
    path = tmp_path / "resolved.yaml"
    path.write_text(dump(config))
    assert load(path) == config


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_valid_and_yields_to_the_file(name):
    assert resolve(RAW | {"preset": name}).preset == (name,)
    assert resolve(RAW | {"preset": name, "objective": {"delta": 0.3}}).objective.delta == 0.3


def test_a_config_is_frozen():
    with pytest.raises(Exception, match="frozen"):
        resolve(RAW).steps = 3


@pytest.mark.parametrize(
    "path", sorted((Path(__file__).parent.parent / "configs").rglob("*.yaml")), ids=lambda p: p.stem
)
def test_the_configs_of_the_repository_are_valid(path):
    assert len(load(path).agents) >= 1


def test_every_key_and_preset_is_documented():
    text = (Path(__file__).parent.parent / "docs" / "config.md").read_text("utf-8")
    known = set(re.findall(r"[\w.]+", " ".join(re.findall(r"`([^`]+)`", text))))
    words = known | {part for word in known for part in word.split(".")}

    def fields(tree):
        return {
            key for key, value in tree.items() for key in (key, *(fields(value) if isinstance(value, dict) else ()))
        }

    full = Config(**RAW, eval={"sets": [{"data": {}}]}).model_dump()
    found = fields(full) | fields(full["agents"][0]) | fields(full["eval"]["sets"][0])
    assert found - words - {"enable_thinking"} == set()
    assert {name for name in PRESETS if not name.startswith("hacpo_alpha")} - words == set()
