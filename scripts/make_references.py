"""Write tests/references/NAME.npz: what PyTorch transformers computes for tiny random models.

    python scripts/make_references.py

Needs torch. The models are written from a frozen random stream (numpy's RandomState), so the tests make the very same
folders without torch and compare with what is stored here: logits in float32, PyTorch's own bfloat16 error, and greedy
continuations.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from hacrl_jax.models import hf, tensors

REFERENCES = Path(__file__).parent.parent / "tests" / "references"
GREEDY = 64  # tokens of a continuation
TAIL = 9  # embedding rows past the tokenizer's ids

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 168, "hidden_size": 48,
    "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 6, "num_key_value_heads": 2,
    "head_dim": 24, "rms_norm_eps": 1e-6, "hidden_act": "silu", "max_position_embeddings": 8192,
    "attention_bias": False, "attention_dropout": 0.0, "use_sliding_window": False, "sliding_window": None,
    "max_window_layers": 3, "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 168, "hidden_size": 64,
    "intermediate_size": 112, "num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "rms_norm_eps": 1e-5, "hidden_act": "silu", "max_position_embeddings": 8192,
    "attention_bias": False, "attention_dropout": 0.0, "mlp_bias": False, "pretraining_tp": 1,
    "torch_dtype": "bfloat16", "eos_token_id": 2,
}  # fmt: skip
STRETCH = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 256}

# Both layouts of the rotary settings, tied and untied heads, scaling on and off, one kv head and one per head.
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_tied": QWEN3 | {"tie_word_embeddings": True, "rope_theta": 1e6, "rope_scaling": None},
    "qwen3_untied": QWEN3 | {
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "default", "rope_theta": 5e6},
        "num_key_value_heads": 1,
    },
    "llama_tied": LLAMA | {"tie_word_embeddings": True, "rope_theta": 5e5,
                           "rope_scaling": {"rope_type": "llama3", **STRETCH}},
    "llama_untied": LLAMA | {
        "tie_word_embeddings": False, "rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **STRETCH},
        "head_dim": 40, "num_key_value_heads": 4,
    },
    "llama_plain": LLAMA | {"tie_word_embeddings": False, "rope_theta": 1e4, "head_dim": None},
}  # fmt: skip


def write_model(name: str, folder: Path, code: str = "BF16") -> None:
    """A folder in Hugging Face layout with random weights, exact in bfloat16: norms around 1, not at it, and matrices
    wide enough for attention to matter."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({k: v for k, v in MODELS[name].items() if v is not None}, indent=2))
    shapes = {name: shape for name, (_, shape) in hf.names(hf.read_config(folder)).items()}
    stream = np.random.RandomState(sum(name.encode()))

    def value(tensor: str) -> np.ndarray:
        noise = stream.standard_normal(shapes[tensor])
        wide = 1 + 0.3 * noise if len(shapes[tensor]) == 1 else 0.15 * noise
        return wide.astype(np.float32).astype(ml_dtypes.bfloat16).astype(tensors.DTYPES[code])

    tensors.write(folder, [(tensor, code, shape) for tensor, shape in shapes.items()], 10**9, value)


def inputs(vocab_size: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(tokens [3, 48], positions [3, 48], prompt [2, 7]): rows from 0, up to 5,000, and spread over 0 .. 5,000."""
    stream = np.random.RandomState(seed)
    tokens = stream.randint(0, vocab_size, (3, 48))
    positions = np.stack([np.arange(48), np.arange(4953, 5001), np.linspace(0, 5000, 48).astype(int)])
    return tokens, positions, stream.randint(0, vocab_size - TAIL, (2, 7))


def torch_results(folder: Path, ids: int, seed: int = 0) -> dict[str, np.ndarray]:
    """What transformers computes: float32 logits [3, 48, V], the same in bfloat16, and continuations [2, 64] that never
    leave the first ids rows of the vocabulary."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    def load(dtype: torch.dtype) -> Any:
        return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()

    model = load(torch.float32)
    vocab_size = model.config.vocab_size
    tokens, positions, prompt = (torch.tensor(part) for part in inputs(vocab_size, seed))
    # The mask is stated: transformers takes jumps in the positions for the borders of packed sequences otherwise.
    arguments = {"input_ids": tokens, "position_ids": positions, "attention_mask": torch.ones_like(tokens)}
    model.generation_config = GenerationConfig(
        max_new_tokens=GREEDY, do_sample=False, pad_token_id=0, suppress_tokens=list(range(ids, vocab_size)) or None
    )
    with torch.no_grad():
        exact = model(**arguments).logits.numpy()
        greedy = model.generate(prompt, attention_mask=torch.ones_like(prompt))[:, prompt.shape[1] :].numpy()
        del model
        # Loaded anew: casting the float32 model would round its inverse frequencies too, and flatter us.
        rough = load(torch.bfloat16)(**arguments).logits.float().numpy()
    return {"logits": exact, "bfloat16": rough, "greedy": greedy}


def main() -> None:
    import tempfile

    REFERENCES.mkdir(parents=True, exist_ok=True)
    for name, config in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            write_model(name, Path(folder))
            found = torch_results(Path(folder), config["vocab_size"] - TAIL)
        error = np.sqrt(np.mean((found["bfloat16"] - found["logits"]) ** 2))
        np.savez_compressed(
            REFERENCES / f"{name}.npz", logits=found["logits"][:, ::4], bfloat16_error=error, greedy=found["greedy"]
        )
        print(f"{name}: logits of scale {found['logits'].std():.3f}, bfloat16 error {error:.2e}")


if __name__ == "__main__":
    main()
