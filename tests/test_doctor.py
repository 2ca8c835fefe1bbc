"""`hacrl doctor`: healthy configs pass, and every kind of trouble is told before the run, by agent and pair."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from hacrl_jax import cli, config, doctor, pairing, tokenizer
from hacrl_jax.config import DataConfig, PromptConfig
from hacrl_jax.models import tensors
from hacrl_jax.tasks import data

AGENTS = Path(doctor.__file__).parent / "agents"
NAMES = {"ada": "tiny-qwen3-a", "bob": "tiny-qwen3-b", "lima": "tiny-llama"}


def settings(*names: str, **changes):
    agents = [{"name": name, "model": str(AGENTS / NAMES[name])} for name in names]
    raw = {
        "name": "d", "minibatch": 4, "agents": agents,
        "data": {"source": "arithmetic", "arithmetic": {"size": 60}},
        "rollout": {"prompts": 4, "samples": 2, "max_prompt": 40, "max_response": 40},
    }  # fmt: skip
    return config.resolve(raw | changes)


def copy_of(agent: str, folder: Path) -> Path:
    shutil.copytree(AGENTS / NAMES[agent], folder)
    return folder


def edit(file: Path, **fields) -> None:
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def test_a_healthy_config_is_ready():
    report = doctor.examine(settings("ada", "lima"))
    assert report.healthy and report.warnings == [] and report.verdict == "ready to train"
    ada, lima = report.agents
    assert ada.weights == lima.weights == doctor.SOUND
    stored = tensors.scan(AGENTS / "tiny-qwen3-a").values()
    assert ada.parameters == ada.trained == sum(int(np.prod(one.shape)) for one in stored)
    assert ada.bytes["moments"] == 2 * ada.bytes["parameters"] == 8 * ada.parameters
    assert (ada.bos, lima.bos) == (None, "<|begin_of_text|>") and lima.eos[0] == "<|eot_id|>"
    there, back = report.pairs
    assert (there.source, there.learner, there.same) == ("ada", "lima", False)
    assert there.lossless == there.texts == 60 and there.lost == {} and report.sample == "worked answers"
    assert there.inflation * back.inflation == pytest.approx(1)
    text = doctor.table(report)
    assert text.splitlines()[-1] == "verdict: ready to train"
    assert "60 of 60 worked answers come back whole" in text


def test_one_tokenizer_needs_no_exchange():
    report = doctor.examine(settings("ada", "bob"), weights=False)
    assert all(one.same and one.inflation == 1 and one.collisions == () for one in report.pairs)
    assert [one.weights for one in report.agents] == ["not read", "not read"]
    assert "ids go over as they are" in doctor.table(report)
    assert doctor.examine(settings("ada", "bob", preset="gspo"), weights=False).pairs == []


def test_low_rank_updates_are_counted():
    agents = [{"name": "ada", "model": str(AGENTS / "tiny-qwen3-a"), "lora": {"rank": 2, "targets": ["q_proj"]}}]
    [ada] = doctor.examine(settings(agents=agents), weights=False).agents
    assert ada.trained == 4 * 2 * (64 + 64)  # layers, rank, sides of the kernel
    assert ada.parameters == doctor.examine(settings("ada"), weights=False).agents[0].parameters
    assert ada.bytes["parameters"] == 4 * (ada.parameters + ada.trained)


def test_a_broken_agent_does_not_hide_the_others(tmp_path):
    torn = copy_of("bob", tmp_path / "torn")
    (torn / "model.safetensors").write_bytes((torn / "model.safetensors").read_bytes()[:5000])
    odd = copy_of("bob", tmp_path / "odd")
    edit(odd / "config.json", attention_bias=True)
    agents = [{"name": name, "model": str(tmp_path / name)} for name in ("torn", "odd")]
    agents.append({"name": "ada", "model": str(AGENTS / "tiny-qwen3-a")})
    report = doctor.examine(settings(agents=agents, rollout={"prompts": 4, "samples": 4, "max_prompt": 40,
                                                             "max_response": 40}))  # fmt: skip
    assert [one.weights for one in report.agents] == ["do not load", "not read", doctor.SOUND]
    assert len(report.faults) == 2 and "cut short" in report.faults[0] and "attention_bias" in report.faults[1]
    assert report.verdict == "not ready: 2 faults"


def test_weights_that_are_not_finite_are_told(tmp_path):
    folder = copy_of("bob", tmp_path / "nan")
    arrays = {name: one.read(slice(0, one.shape[0])) for name, one in tensors.scan(folder).items()}
    arrays["model.norm.weight"] = arrays["model.norm.weight"] * np.float32("nan")
    tensors.write(folder, [(name, "F32", array.shape) for name, array in arrays.items()], 10**9, arrays.get)
    report = doctor.examine(settings(agents=[{"name": "n", "model": str(folder)}]))
    assert not report.healthy and "not finite" in report.faults[0]


def test_prompts_over_the_limit(tmp_path):
    rows = [{"question": "1" * size, "answer": "1"} for size in (5, 5, 5, 5, 90)]
    (tmp_path / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = {"source": str(tmp_path / "d.jsonl")}
    report = doctor.examine(settings("ada", "bob", data=train, eval={"sets": [{"data": train}]}), weights=False)
    assert [one.over for one in report.agents] == [{"training": 1, "d": 1}] * 2
    assert len(report.warnings) == len(report.faults) == 2  # left out of training; evaluation cannot leave it out
    train = {"source": str(tmp_path / "d.jsonl"), "limit": 3}
    report = doctor.examine(settings("ada", data=train), weights=False)
    assert report.faults == ["training: all agents can read 3 problems, and rollout.prompts is 4"]
    report = doctor.examine(settings("ada", data={"source": "absent.jsonl"}), weights=False)
    assert len(report.faults) == 1 and "absent.jsonl does not exist" in report.faults[0]
    rollout = {"prompts": 4, "samples": 2, "max_prompt": 40, "max_response": 1000}
    assert "512 positions" in doctor.examine(settings("ada", rollout=rollout), weights=False).faults[0]


def test_ends_that_do_not_fit_the_template(tmp_path):
    folder = copy_of("ada", tmp_path / "base")  # like Qwen3's base models, which end with <|endoftext|>
    edit(folder / "tokenizer_config.json", eos_token="<|endoftext|>")
    edit(folder / "generation_config.json", eos_token_id=267)
    report = doctor.examine(settings(agents=[{"name": "base", "model": str(folder)}]), weights=False)
    assert report.healthy and len(report.warnings) == 1 and "'<|im_end|>'" in report.warnings[0]
    twice = copy_of("lima", tmp_path / "twice")
    template = json.loads((twice / "tokenizer_config.json").read_text())["chat_template"]
    edit(twice / "tokenizer_config.json", chat_template="{{ bos_token }}" + template)
    report = doctor.examine(settings(agents=[{"name": "twice", "model": str(twice)}]), weights=False)
    assert any("2 BOS tokens" in line for line in report.faults)


def test_collisions_of_special_tokens(tmp_path):
    folder = copy_of("ada", tmp_path / "plain")  # the same vocabulary, in which one control token is ordinary
    tokens = json.loads((folder / "tokenizer.json").read_text())
    end = next(one for one in tokens["added_tokens"] if one["content"] == "<|im_start|>")
    end["special"] = False
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    agents = [{"name": "ada", "model": str(AGENTS / "tiny-qwen3-a")}, {"name": "plain", "model": str(folder)}]
    there, back = doctor.examine(settings(agents=agents), weights=False).pairs
    assert there.same and len(there.collisions) == len(back.collisions) == 1
    assert "special for ada and ordinary for plain" in there.collisions[0]
    assert "special for ada and ordinary for plain" in back.collisions[0]


def test_lost_texts_are_counted_with_their_reason():
    own, other = (tokenizer.load(AGENTS / NAMES[name], PromptConfig()) for name in ("ada", "lima"))
    found = pairing.pair("ada", "lima", own, other, ["7+8=15", "a cut \ufffd", "é<|eot_id|>\r\n\x00 "], 40)
    assert (found.texts, found.lossless, found.lost) == (3, 2, {"cut character": 1})
    assert pairing.pair("ada", "lima", own, other, ["7+8=15" * 9], 40).over in (0, 1)


@pytest.mark.parametrize("name", ["math500", "gsm8k_test"])
def test_solutions_cross_between_the_real_tokenizers(shared, tmp_path, name):
    """Qwen3's and Llama 3's: all of a sample of the published solutions come back whole."""
    toks = {}
    for kind in ("qwen3", "llama3"):
        shutil.copytree(shared / "tokenizers" / kind, tmp_path / kind)
        (tmp_path / kind / "config.json").write_text("{}")
        toks[kind] = tokenizer.load(tmp_path / kind, PromptConfig())
    source = DataConfig(source=str(shared / "data" / f"{name}.jsonl"), allow_bad_rows=True, limit=300)
    texts, what = pairing.sample(source, data.problems(source)[0])
    assert what == "solutions" and len(texts) == pairing.SAMPLE
    found = pairing.pair("qwen3", "llama3", toks["qwen3"], toks["llama3"], texts, 4096)
    assert not found.same and found.lossless == found.texts and found.collisions == ()
    assert 0.8 < found.inflation < 1.0  # Qwen3 writes every digit apart, Llama 3 up to three together


def test_the_sample_without_solutions(tmp_path):
    (tmp_path / "d.jsonl").write_text(json.dumps({"question": "1+1?", "answer": "2"}) + "\n")
    source = DataConfig(source=str(tmp_path / "d.jsonl"))
    assert pairing.sample(source, data.problems(source)[0]) == (["1+1?\n2"], "problems with their answers")


def test_on_the_command_line(tmp_path, capsys):
    (tmp_path / "c.yaml").write_text(config.dump(settings("ada", "lima")))
    for override, status in ("steps=3", 0), ("rollout.max_prompt=4", 1), ("rollout.max_prompt=x", 2):
        with pytest.raises(SystemExit) as ended:
            cli.main(["doctor", str(tmp_path / "c.yaml"), override, "--no-weights", "--json"])
        out, err = capsys.readouterr()
        assert ended.value.code == status
        if status == 2:
            assert err.count("\n") == 1 and out == ""
        else:
            assert json.loads(out)["verdict"] == ("ready to train" if status == 0 else "not ready: 1 fault, 2 warnings")
