"""The decoder against PyTorch transformers: stored results everywhere, a live comparison where torch is installed."""

import check_hf_parity
import make_references
import numpy as np
import pytest

from hacrl_jax.models import rope


@pytest.mark.parametrize("name", make_references.MODELS)
def test_stored_references(name, tmp_path):
    make_references.write_model(name, tmp_path)
    ids = make_references.MODELS[name]["vocab_size"] - make_references.TAIL
    ours = check_hf_parity.our_results(tmp_path, ids)
    stored = np.load(make_references.REFERENCES / f"{name}.npz")
    exact = stored["logits"]  # every fourth position
    assert np.abs(ours["logits"][:, ::4] - exact).max() < 1e-4 * exact.std()
    np.testing.assert_array_equal(ours["greedy"], stored["greedy"])
    assert ours["greedy"].shape == (2, 64) and ours["greedy"].max() < ids
    assert np.sqrt(np.mean((ours["bfloat16"] - ours["logits"]) ** 2)) <= stored["bfloat16_error"]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("name", make_references.MODELS)
def test_live(name, seed, tmp_path):
    pytest.importorskip("torch", reason="compares with PyTorch; the stored references are compared without it")
    make_references.write_model(name, tmp_path)
    ids = make_references.MODELS[name]["vocab_size"] - make_references.TAIL
    theirs = make_references.torch_results(tmp_path, ids, seed)
    row = check_hf_parity.compare(check_hf_parity.our_results(tmp_path, ids, seed), theirs)
    assert check_hf_parity.passed(row), row


@pytest.mark.slow
def test_the_script_takes_a_folder_it_has_not_seen(tmp_path, capsys):
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=99, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
                         num_attention_heads=4, num_key_value_heads=1, initializer_range=0.2)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(tmp_path, max_shard_size="20KB")
    assert check_hf_parity.main([str(tmp_path)]) == 0
    assert str(tmp_path) in capsys.readouterr().out


@pytest.mark.parametrize("head_dim", [24, 32, 64, 128])
@pytest.mark.parametrize("theta", [1e4, 5e5, 1e6, 5e6])
@pytest.mark.parametrize("scaled", [False, True])
def test_inverse_frequencies_round_as_transformers_does(head_dim, theta, scaled):
    torch = pytest.importorskip("torch", reason="compares with PyTorch")
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    stretch = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    stretch["original_max_position_embeddings"] = 8192
    if scaled:
        config = LlamaConfig(head_dim=head_dim, rope_parameters={"rope_type": "llama3", "rope_theta": theta, **stretch})
        theirs = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    else:
        exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).to(torch.float) / head_dim
        theirs = (1.0 / theta**exponent).numpy()
    ours = rope.inverse_frequencies(head_dim, theta, rope.RopeScaling(**stretch) if scaled else None)
    assert ours.dtype == np.float32
    assert np.all(np.abs(ours - theirs) <= 2 * np.spacing(theirs))
    assert np.mean(ours == theirs) > 0.9
