"""Checkpoints in and out: round trips to the bit, refusals by name, bounded memory."""

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import make_references
import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open

from hacrl_jax import sharding
from hacrl_jax.config import LoraConfig, MeshConfig
from hacrl_jax.models import decoder, hf, streaming, tensors
from hacrl_jax.types import UserError


@pytest.fixture
def model(tmp_path: Path) -> Path:
    make_references.write_model("qwen3_untied", tmp_path / "model")
    return tmp_path / "model"


def raw(folder: Path) -> dict[str, tuple[str, bytes]]:
    return {
        name: (stored.code, stored.read(slice(0, stored.shape[0])).tobytes())
        for name, stored in tensors.scan(folder).items()
    }


def edit(folder: Path, **fields: object) -> None:
    config = json.loads((folder / "config.json").read_text()) | fields
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v != "absent"}))


def rewrite(folder: Path, change) -> None:
    """Write the weights again after change(dict of name -> array)."""
    arrays = {name: stored.read(slice(0, stored.shape[0])) for name, stored in tensors.scan(folder).items()}
    change(arrays)
    codes = {dtype: code for code, dtype in tensors.DTYPES.items()}
    tensors.write(folder, [(n, codes[a.dtype], a.shape) for n, a in arrays.items()], 10**9, arrays.get)


@pytest.mark.parametrize("code", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("mesh", [None, MeshConfig(data=1, fsdp=2, tensor=1)])
def test_round_trip_is_bit_equal(tmp_path, code, mesh):
    make_references.write_model("llama_tied", tmp_path / "model", code)
    mesh = mesh and sharding.make_mesh(mesh, jax.devices()[:2])
    _, config, params = hf.load(tmp_path / "model", mesh=mesh)
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {jnp.dtype(jnp.float32)}
    hf.save(tmp_path / "out", params, config, tmp_path / "model", shard_bytes=30_000)
    assert raw(tmp_path / "out") == raw(tmp_path / "model")
    assert (tmp_path / "out" / tensors.INDEX).is_file()
    hf.save(tmp_path / "again", hf.load(tmp_path / "out")[2], config, tmp_path / "out")
    assert (tmp_path / "again" / tensors.SINGLE).read_bytes() == (tmp_path / "model" / tensors.SINGLE).read_bytes()


def test_every_bfloat16_number_survives(tmp_path):
    """The smallest ones too, which processors like to flush to zero."""
    make_references.write_model("llama_tied", tmp_path / "model")
    edit(tmp_path / "model", vocab_size=1024)
    patterns = np.arange(2**16, dtype=np.uint16).view(ml_dtypes.bfloat16)
    patterns = np.where(np.isnan(patterns.astype(np.float32)), ml_dtypes.bfloat16(0), patterns)
    rewrite(tmp_path / "model", lambda arrays: arrays.update({"model.embed_tokens.weight": patterns.reshape(1024, 64)}))
    _, config, params = hf.load(tmp_path / "model")
    hf.save(tmp_path / "out", params, config, tmp_path / "model")
    assert raw(tmp_path / "out") == raw(tmp_path / "model")


def test_the_safetensors_package_reads_what_we_write(model):
    with safe_open(model / tensors.SINGLE, "numpy") as opened:
        assert set(opened.keys()) == set(tensors.scan(model))
        assert opened.metadata() == {"format": "pt"}


def test_sharded_load_places_every_slice(model, tmp_path):
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    _, config, whole = hf.load(model)
    with jax.set_mesh(mesh):  # as in a run
        _, _, split = hf.load(model, mesh=mesh)
        hf.save(tmp_path / "out", split, config, model)
    assert raw(tmp_path / "out") == raw(model)
    axes = decoder.abstract(config)[2]
    wanted = sharding.shardings(axes, mesh, whole)
    jax.tree.map(lambda a, place: a.sharding.is_equivalent_to(place, a.ndim) or pytest.fail(f"{place}"), split, wanted)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), split, whole)
    assert split["layers"]["gate_proj"]["kernel"].addressable_shards[0].data.shape == (3, 24, 56)


def test_pieces_smaller_than_a_tensor(model, monkeypatch):
    whole = hf.load(model)[2]
    monkeypatch.setattr(streaming, "PIECE_BYTES", 1000)
    mesh = sharding.make_mesh(MeshConfig(data=1, fsdp=2, tensor=1), jax.devices()[:2])
    for pieces in (hf.load(model)[2], hf.load(model, mesh=mesh)[2]):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b), pieces, whole)


def test_side_files_are_copied_and_the_card_replaced(model, tmp_path):
    (model / "tokenizer.json").write_bytes(b"\x00\xff\r\n{}")
    (model / "README.md").write_text("old")
    (model / "sub").mkdir()
    (model / "sub" / "chat_template.jinja").write_text("{{ x }}\r\n")
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    _, config, params = hf.load(model)
    hf.save(tmp_path / "out", params, config, model, model_card="new")
    found = {str(p.relative_to(tmp_path / "out")) for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert found == {"config.json", "tokenizer.json", "README.md", "sub/chat_template.jinja", "model.safetensors"}
    for name in ("config.json", "tokenizer.json", "sub/chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (model / name).read_bytes()
    assert (tmp_path / "out" / "README.md").read_text() == "new"


def test_a_failed_save_leaves_nothing(model, tmp_path, monkeypatch):
    _, config, params = hf.load(model)
    monkeypatch.setattr(tensors.os, "fsync", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        hf.save(tmp_path / "out" / "deep", params, config, model)
    assert list((tmp_path / "out").iterdir()) == []


def test_save_refuses_a_full_folder(model):
    _, config, params = hf.load(model)
    with pytest.raises(UserError, match="already exists"):
        hf.save(model, params, config, model)


def test_float16_out_of_range_is_refused(tmp_path):
    make_references.write_model("llama_tied", tmp_path / "model", "F16")
    _, config, params = hf.load(tmp_path / "model")
    params["norm"] = params["norm"].at[0].set(1e6)
    with pytest.raises(UserError, match=r"model\.norm\.weight left the range of float16"):
        hf.save(tmp_path / "out", params, config, tmp_path / "model")
    assert not (tmp_path / "out").exists()


def test_lora_is_merged_on_export(model, tmp_path):
    lora = LoraConfig(rank=4, alpha=6.0, targets=("q_proj", "down_proj"))
    graphdef, config, params = hf.load(model, lora=lora)
    assert not np.any(params["layers"]["q_proj"]["lora_b"])
    hf.save(tmp_path / "zero", params, config, model, lora=lora)
    assert raw(tmp_path / "zero") == raw(model)
    for name in lora.targets:
        part = params["layers"][name]
        part["lora_b"] = 0.3 * jax.random.normal(jax.random.key(1), part["lora_b"].shape)
    rewrite(model, lambda arrays: arrays.update({n: a.astype(np.float32) for n, a in arrays.items()}))
    hf.save(tmp_path / "out", params, config, model, lora=lora)
    plain, _, merged = hf.load(tmp_path / "out")
    tokens = np.arange(24).reshape(2, 12)
    positions = np.broadcast_to(np.arange(12), tokens.shape)
    forward = jax.jit(decoder.apply, static_argnums=0)
    ours, exported = forward(graphdef, params, tokens, positions)[0], forward(plain, merged, tokens, positions)[0]
    np.testing.assert_allclose(ours, exported, atol=2e-5)
    assert np.abs(ours - forward(plain, hf.load(model)[2], tokens, positions)[0]).max() > 0.1
    with pytest.raises(ValueError, match="LoraConfig"):
        hf.save(tmp_path / "lost", params, config, model)


def test_wrong_tensors_are_listed(model):
    def change(arrays):
        del arrays["model.layers.1.mlp.up_proj.weight"], arrays["lm_head.weight"]
        arrays["model.layers.0.self_attn.q_proj.bias"] = np.zeros(4, np.float32)
        arrays["model.norm.weight"] = np.zeros(7, np.float32)

    rewrite(model, change)
    with pytest.raises(UserError) as caught:
        hf.load(model)
    text = str(caught.value)
    assert "missing tensors: model.layers.1.mlp.up_proj.weight, lm_head.weight" in text
    assert "extra tensors: model.layers.0.self_attn.q_proj.bias" in text
    assert "model.norm.weight is [7], not [48]" in text
    assert "\n" not in text


def test_a_tied_model_may_repeat_its_embedding(tmp_path):
    make_references.write_model("llama_tied", tmp_path / "model")
    rewrite(tmp_path / "model", lambda a: a.update({"lm_head.weight": a["model.embed_tokens.weight"]}))
    _, config, params = hf.load(tmp_path / "model")
    assert "head" not in params
    hf.save(tmp_path / "out", params, config, tmp_path / "model")
    assert raw(tmp_path / "out") == raw(tmp_path / "model")
    rewrite(tmp_path / "model", lambda a: a.update({"lm_head.weight": a["lm_head.weight"] * 2}))
    with pytest.raises(UserError, match="differs from the embedding"):
        hf.load(tmp_path / "model")


def test_broken_files_are_named(model):
    whole = (model / tensors.SINGLE).read_bytes()
    for content, message in ((whole[:-5], "cut short"), (b"", "not a safetensors file"), (b"\xff" * 40, "safetensors")):
        (model / tensors.SINGLE).write_bytes(content)
        with pytest.raises(UserError, match=message):
            hf.load(model)
    (model / tensors.SINGLE).unlink()
    with pytest.raises(UserError, match="only safetensors"):
        hf.load(model)
    (model / tensors.INDEX).write_text(json.dumps({"weight_map": {"a": "gone.safetensors"}}))
    with pytest.raises(UserError, match=r"gone\.safetensors"):
        hf.load(model)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["MistralForCausalLM"]}, "architecture MistralForCausalLM"),
        ({"architectures": ["Qwen3MoeForCausalLM"], "num_experts": 8}, "Qwen3MoeForCausalLM"),
        ({"architectures": "absent"}, "none named"),
        ({"model_type": "qwen2"}, "model_type 'qwen2'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"mlp_bias": True}, "mlp_bias True"),
        ({"attention_dropout": 0.1}, "attention_dropout 0.1"),
        ({"use_sliding_window": True, "sliding_window": 512}, "use_sliding_window True"),
        ({"use_sliding_window": "absent", "sliding_window": 512}, "sliding_window 512"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ({"num_experts": 8}, "num_experts"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"logit_soft_cap": 30.0}, "logit_soft_cap"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "disagree|'yarn'"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e6, "factor": 4.0}}, "low_freq_factor"),
        ({"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "rope_theta": 1e6}}, "partial_rot"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope type None"),
        ({"rope_parameters": {"rope_type": "default"}}, "rope_theta is missing"),
        ({"rope_theta": 1e4}, "rope_theta is stated with different values"),
        ({"head_dim": "absent"}, "head_dim is missing"),
        ({"head_dim": 23}, "head_dim 23"),
        ({"num_key_value_heads": "absent"}, "num_key_value_heads is missing"),
        ({"num_key_value_heads": 4}, "does not divide"),
        ({"tie_word_embeddings": "absent"}, "tie_word_embeddings is missing"),
        ({"rms_norm_eps": "absent"}, "rms_norm_eps is missing"),
        ({"hidden_size": "48"}, "hidden_size '48'"),
    ],
)
def test_unsupported_configurations_are_refused_by_name(model, fields, message):
    edit(model, **fields)
    with pytest.raises(UserError, match=message) as caught:
        hf.read_config(model)
    assert "\n" not in str(caught.value)


def test_both_layouts_of_the_rotary_settings_agree(tmp_path):
    make_references.write_model("llama_tied", tmp_path)
    old = hf.read_config(tmp_path)
    scaling = json.loads((tmp_path / "config.json").read_text())["rope_scaling"]
    edit(tmp_path, rope_theta="absent", rope_scaling="absent", rope_parameters=scaling | {"rope_theta": 5e5})
    assert hf.read_config(tmp_path) == old
    assert old.rope_scaling.factor == 8 and old.rope_theta == 5e5
    edit(tmp_path, rope_theta=5e5, rope_parameters="absent", rope_scaling=scaling | {"type": "llama3"})
    assert hf.read_config(tmp_path) == old


def test_published_configurations_abstractly(shared, tmp_path):
    models = json.loads((shared / "models.json").read_text())["models"]
    assert len(models) == 11
    for name, shape in models.items():
        fields = {k: v for k, v in shape.items() if k not in ("parameters", "architecture")}
        (tmp_path / "config.json").write_text(
            json.dumps(fields | {"architectures": [shape["architecture"]], "hidden_act": "silu"})
        )
        config = hf.read_config(tmp_path)
        _, params, axes = decoder.abstract(config)
        assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(params)) == shape["parameters"], name
        listed = hf.names(config)
        assert sum(math.prod(size) for _, size in listed.values()) == shape["parameters"]
        assert ("lm_head.weight" in listed) is not shape["tie_word_embeddings"]
        assert ("model.layers.0.self_attn.q_norm.weight" in listed) == name.startswith("Qwen3")
        per_layer = 11 if name.startswith("Qwen3") else 9
        assert len(listed) == shape["num_hidden_layers"] * per_layer + 2 + (not shape["tie_word_embeddings"])
        assert jax.tree.all(jax.tree.map(lambda leaf, names: len(names) == leaf.ndim, params, axes))


def test_transformers_names_the_same_tensors(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch", reason="transformers builds its models with torch")
    for name in make_references.MODELS:
        make_references.write_model(name, tmp_path / name)
        with torch.device("meta"):
            config = transformers.AutoConfig.from_pretrained(tmp_path / name)
            theirs = transformers.AutoModelForCausalLM.from_config(config)
        shapes = {key: tuple(value.shape) for key, value in theirs.state_dict().items()}
        if config.tie_word_embeddings:
            del shapes["lm_head.weight"]
        assert shapes == {key: size for key, (_, size) in hf.names(hf.read_config(tmp_path / name)).items()}


def test_resolve_local_folders(tmp_path):
    assert hf.resolve(str(tmp_path)) == tmp_path
    assert hf.commit(tmp_path) is None
    with pytest.raises(UserError, match="applies to hub ids only"):
        hf.resolve(str(tmp_path), "main")
    with pytest.raises(UserError, match="neither a folder"):
        hf.resolve(str(tmp_path / "absent"))


def test_resolve_offline_uses_the_cache_only(tmp_path):
    commit = "0123456789abcdef" * 2 + "01234567"
    home = tmp_path / "models--some--model"
    (home / "refs").mkdir(parents=True)
    (home / "refs" / "main").write_text(commit)
    (home / "snapshots" / commit).mkdir(parents=True)
    (home / "snapshots" / commit / "config.json").write_text("{}")
    script = (
        "from hacrl_jax.models import hf; from hacrl_jax.types import UserError\n"
        "folder = hf.resolve('some/model'); print(folder); print(hf.commit(folder))\n"
        "try: hf.resolve('some/other')\n"
        "except UserError as error: print(error)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True,
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HUB_CACHE": str(tmp_path)},
    ).stdout.splitlines()  # fmt: skip
    assert found[0] == str(home / "snapshots" / commit) and found[1] == commit
    assert len(found) == 3 and found[2].startswith("model some/other: no such folder")


# VmHWM, not getrusage: a child's ru_maxrss starts at the size of the process that started it.
MEASURE = """
import sys, jax, jax.numpy as jnp
from hacrl_jax.models import hf
def memory(line):
    return 1024 * int(next(text for text in open("/proc/self/status") if text.startswith(line)).split()[1])
jax.block_until_ready(jnp.ones(8) + 1)
start = memory("VmRSS")
params = jax.block_until_ready(hf.load(sys.argv[1], dtype=sys.argv[2])[2])
print((memory("VmHWM") - start) / sum(leaf.nbytes for leaf in jax.tree.leaves(params)))
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc/self/status")
def test_a_gigabyte_loads_within_a_quarter_more(tmp_path):
    make_references.write_model("qwen3_tied", tmp_path)
    edit(tmp_path, vocab_size=151936, hidden_size=1024, intermediate_size=3072, num_hidden_layers=22,
         num_attention_heads=16, num_key_value_heads=8, head_dim=128)  # fmt: skip
    listed = hf.names(hf.read_config(tmp_path))
    noise = np.random.default_rng(0).standard_normal(10**6, np.float32).astype(ml_dtypes.bfloat16)
    (tmp_path / tensors.SINGLE).unlink()
    tensors.write(tmp_path, [(n, "BF16", s) for n, (_, s) in listed.items()], 400 * 10**6,
                  lambda name: np.resize(noise, listed[name][1]))  # fmt: skip
    assert sum(file.stat().st_size for file in tmp_path.glob("*.safetensors")) > 10**9
    for dtype in ("float32", "bfloat16"):
        found = subprocess.run([sys.executable, "-c", MEASURE, str(tmp_path), dtype], check=True, capture_output=True,
                               text=True, env={**os.environ, "XLA_FLAGS": ""})  # fmt: skip
        assert float(found.stdout) < 1.25, (dtype, found.stdout)
