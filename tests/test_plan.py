"""Plans: bytes from shardings, the estimate without a compiler, and programs compiled for a TPU where libtpu is."""

import dataclasses
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from hacrl_jax import plan, topology
from hacrl_jax.cli import app
from hacrl_jax.config import load
from hacrl_jax.models.published import published
from hacrl_jax.types import UserError

ROOT = Path(__file__).parent.parent
PAPER = sorted((ROOT / "configs" / "paper").glob("*.yaml"))
PAIR = ROOT / "configs" / "paper" / "qwen3_4b_and_8b.yaml"
PARAMETERS = {"qwen3-4b-base": 4_022_468_096, "qwen3-8b-base": 8_190_735_360}
GIB = 2**30


def analytic(*overrides: str, path: Path = PAIR, name: str = "v5e:4x4") -> plan.Plan:
    return plan.plan(load(path, overrides), name, analytic=True)


def test_the_published_shapes_are_the_models(shared):
    known = json.loads((shared / "models.json").read_text())["models"]
    found = 0
    for name, facts in known.items():
        for owner in ("Qwen", "meta-llama"):
            shape = published(f"{owner}/{name}")
            if shape is None:
                continue
            found += 1
            record = dataclasses.asdict(shape)
            scaling = facts["rope_scaling"] and {k: v for k, v in facts["rope_scaling"].items() if k != "rope_type"}
            assert record.pop("rope_scaling") == scaling
            assert record.pop("qk_norm") == facts["architecture"].startswith("Qwen3")
            assert {key: facts[key] for key in record} == record, name
    assert found == len(known)


def test_arrays_are_counted_from_their_shardings():
    for one in analytic().agents:
        count = PARAMETERS[one.name]
        assert one.arrays["parameters"] == pytest.approx(count * 4 / 16, rel=1e-3)  # all but the norms are split
        assert one.arrays["moments"] == pytest.approx(2 * one.arrays["parameters"], rel=1e-6)
        assert one.arrays["sampler copy"] == pytest.approx(count * 2 / 16, rel=1e-3)
        assert one.arrays["cache"] == pytest.approx(36 * 2 * 64 * 5120 * 1024 * 2 / 16, rel=0.02)


def test_settings_move_what_they_should():
    plain = analytic("agents.0.offload=none", "agents.1.offload=none")
    assert analytic("rollout.slots=32").agents[0].arrays["cache"] == plain.agents[0].arrays["cache"] // 2
    away = analytic("agents.0.offload=moments", "agents.1.offload=moments")
    moments = [one.arrays["moments"] for one in plain.agents]
    phases = zip(plain.phases, away.phases, strict=True)
    saved = {(one.name, one.agent): one.total - other.total for one, other in phases}
    assert saved["generate", "qwen3-4b-base"] == saved["score", "qwen3-8b-base"] == sum(moments)
    assert saved["update", "qwen3-8b-base"] == moments[0]  # its own are fetched
    everything = analytic("agents.0.offload=all", "agents.1.offload=all")
    assert all(a.total < b.total for a, b in zip(everything.phases, away.phases, strict=True))
    without = analytic("objective.kl_coefficient=0")
    assert all(not one.arrays["reference"] for one in without.agents)
    more = analytic(*(f"agents.{i}.micro_batch=16" for i in range(2)))
    assert more.agents[1].programs["update"].temporaries > plain.agents[1].programs["update"].temporaries


@pytest.mark.parametrize("path", PAPER, ids=lambda path: path.stem)
def test_the_estimate_for_the_papers_pairs(path):
    found = analytic(path=path, name=re.search(r"--topology (\S+)", path.read_text())[1])  # the one it is made for
    assert found.fits, plan.table(found)
    assert "ESTIMATE" in plan.table(found)
    small = analytic(path=path, name="v5e:2x2")
    assert not small.fits and small.advice


def test_the_command_says_no_with_status_1():
    result = CliRunner().invoke(app, ["plan", str(PAIR), "--topology", "v5e:2x2", "--analytic", "--json"])
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert not found["fits"] and found["estimated"] and found["hbm"] == int(15.75 * GIB)
    assert [one["name"] for one in found["agents"]] == list(PARAMETERS)
    for one in found["agents"]:
        assert set(one["programs"]) == {"update", "score", "prefill", "decode"}
        assert set(one["bytes"]) == {"parameters", "moments", "sampler copy", "reference", "cache"}
    for phase in found["phases"]:
        assert set(phase["bytes"]) == set(plan.KINDS)
        assert phase["total"] == sum(phase["bytes"].values())


@pytest.mark.parametrize(
    "name, overrides, words",
    [
        ("v9x:4x4", [], "v9x:4x4"),
        ("v5e", [], "v5e"),
        ("v5e:4x4", ["mesh.fsdp=3"], "mesh"),
        ("v5e:4x4", ["agents.0.model=no/such-model"], "no/such-model"),
    ],
)
def test_mistakes_are_named(monkeypatch, name, overrides, words):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match=words):
        analytic(*overrides, name=name)


HLO = """HloModule jit_f
%cond (p: (s32[], f32[8])) -> pred[] {
  %constant.1 = s32[] constant(5)
  %i = s32[] get-tuple-element(%p), index=0
  ROOT %lt = pred[] compare(%i, %constant.1), direction=LT
}
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %ag = bf16[8,4]{1,0:T(8,128)} all-gather(%x), channel_id=1, dimensions={0}
  %again = bf16[8,4]{1,0:T(8,128)} all-gather(%x), channel_id=1, dimensions={0}
  %start = (f32[2], f32[8]{0:S(1)}) all-gather-start(%y), channel_id=2, dimensions={0}
}
%open (p: pred[]) -> pred[] {
  ROOT %p = pred[] parameter(0)
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %loop = (s32[], f32[8]) while(%t), condition=%cond, body=%body
  %unknown = (s32[], f32[8]) while(%t), condition=%open, body=%inner
  %sum = f32[] all-reduce(%z), channel_id=3, to_apply=%add
}
%inner (p: f32[]) -> f32[] {
  %r = f32[16]{0} reduce-scatter(%w), channel_id=4, dimensions={0}
}
"""


def test_collectives_count_loops_through_and_channels_once():
    assert topology.collectives(HLO) == {"all-gather": 5 * (64 + 32), "all-reduce": 4, "reduce-scatter": 64}


def test_what_the_compiler_says_of_too_large_programs():
    for message in (
        "RESOURCE_EXHAUSTED: XLA:TPU compile permanent error. Ran out of memory in memory space hbm. Used 20.50G of "
        "15.75G hbm. Exceeded hbm capacity by 4.75G.",
        "RESOURCE_EXHAUSTED: the total memory required for HLO temporaries (20.50G) exceeds available HBM (15.75G).",
    ):
        assert topology._too_large(message, 1.0).temporaries == int(20.5 * GIB)
    with pytest.raises(RuntimeError, match="compiler failed"):
        topology._too_large("INTERNAL: Mosaic failed", 1.0)


SMALL = """
name: small
minibatch: 2
mesh: {{data: 1, fsdp: 2, tensor: 2}}
data: {{source: arithmetic}}
rollout: {{prompts: 4, samples: 2, max_prompt: 128, max_response: 128, slots: 8}}
agents:
- {{name: wide, model: {folder}/wide, packing: true, micro_batch: 2, remat: full, attention: splash}}
- {{name: half, model: {folder}/half, micro_batch: 4, remat: offload, offload: all, mesh: {{fsdp: 4, tensor: 1}}}}
"""


@pytest.mark.slow
@pytest.mark.skipif(topology.libtpu() is None, reason="libtpu is absent: pip install 'hacrl_jax[tpu]' compiles for TPU")
def test_all_programs_compile_for_a_tpu(tmp_path):
    for name, head_dim in (("wide", 128), ("half", 64)):  # both head sizes of the published models
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({
            "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1024, "hidden_size": 256,
            "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
            "head_dim": head_dim, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "tie_word_embeddings": True,
            "max_position_embeddings": 2048, "hidden_act": "silu", "attention_bias": False,
        }))  # fmt: skip
    (tmp_path / "small.yaml").write_text(SMALL.format(folder=tmp_path))
    command = [sys.executable, "-m", "hacrl_jax.cli", "plan", "small.yaml", "--topology", "v5e:2x2", "--json"]
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache"), "PYTHONPATH": str(ROOT)}
    env.pop("XLA_FLAGS", None)
    found = []
    for _ in range(2):
        run = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert run.returncode == 0, run.stderr
        found.append(json.loads(run.stdout))
    first, second = found
    assert first["fits"] and not first["estimated"]
    for one, other in zip(first["agents"], second["agents"], strict=True):
        for name, program in one["programs"].items():
            assert program["arguments"] > 0 and not program["error"], name
            assert other["programs"][name]["cached"]
        assert one["programs"]["update"]["temporaries"] > 0  # the others of so small a model may need none
        assert one["programs"]["update"]["aliased"] > 0  # donated
        assert "all-gather" in one["programs"]["update"]["collectives"]
    assert first["phases"] == second["phases"]
