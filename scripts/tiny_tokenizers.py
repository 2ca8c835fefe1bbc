"""The two tokenizers of the embedded agents, written from nothing: byte-level BPE, so any text survives a round trip.

Both know all 256 bytes and the words of the embedded task; they cut numbers differently, as Qwen3 and Llama 3 do: one
digit a token, or groups of two from the left. Words are whole entries of the vocabulary and there are no merges
(ignore_merges takes a piece that is an entry as it is): nothing is trained here that could come out differently.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

WORDS = ("What", "Ġis", "ĠAnswer", "Ġin", "Ġ\\", "\\boxed", "boxed", "{}.", "system", "user", "assistant")
PIECES = (  # the pre-tokenizer of both families, up to the digits
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN_SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA_SPECIALS = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
QWEN_TEMPLATE = (
    "{%- for message in messages -%}"
    "{{- '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\n' -}}{%- endif -%}"
)
LLAMA_TEMPLATE = (
    "{{- bos_token -}}{%- for message in messages -%}"
    "{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n' + message['content'] + '<|eot_id|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\n' -}}{%- endif -%}"
)


def write_qwen(folder: Path) -> list[int]:
    """Write tokenizer.json and tokenizer_config.json; return the ids that end a response, the primary one first."""
    vocabulary = [*_bytes(), *WORDS]
    _write(folder, vocabulary, QWEN_SPECIALS, r"\p{N}", bos=None)
    _write_config(folder, QWEN_TEMPLATE, bos=None, eos="<|im_end|>", pad="<|endoftext|>")
    return [len(vocabulary) + 2, len(vocabulary)]


def write_llama(folder: Path) -> list[int]:
    """As write_qwen, with BOS, Llama's headers, and pairs of digits as tokens."""
    vocabulary = [*_bytes(), *WORDS, *(f"{i:02d}" for i in range(100))]
    _write(folder, vocabulary, LLAMA_SPECIALS, r"\p{N}{1,2}", bos="<|begin_of_text|>")
    _write_config(folder, LLAMA_TEMPLATE, bos="<|begin_of_text|>", eos="<|eot_id|>", pad="<|end_of_text|>")
    return [len(vocabulary) + 4, len(vocabulary) + 1]


def size(folder: Path) -> int:
    """Number of ids of a tokenizer written here."""
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    return len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])


def _bytes() -> list[str]:
    """The 256 characters that stand for bytes in byte-level BPE (GPT-2's table): printable ones for themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    characters = {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}
    return [characters[byte] for byte in range(256)]


def _write(folder: Path, vocabulary: list[str], specials: tuple[str, ...], digits: str, bos: str | None) -> None:
    first = len(vocabulary)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": PIECES % digits}, "behavior": "Isolated", "invert": False}
    tokenizer: dict[str, Any] = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": first + i, "content": token, "special": True}
            | {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            for i, token in enumerate(specials)
        ],
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": byte_level if bos is None else _prepend(bos, first + specials.index(bos)),
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": True,
            "vocab": {token: i for i, token in enumerate(vocabulary)},
            "merges": [],
        },
    }
    write_json(folder / "tokenizer.json", tokenizer)


def _prepend(bos: str, bos_id: int) -> dict[str, Any]:
    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": bos, "type_id": type_id}}, {"Sequence": {"id": name, "type_id": type_id}}]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _write_config(folder: Path, template: str, bos: str | None, eos: str, pad: str) -> None:
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": bos,
        "eos_token": eos,
        "pad_token": pad,
        "clean_up_tokenization_spaces": False,
        "model_max_length": 512,
        "chat_template": template,
    }
    write_json(folder / "tokenizer_config.json", config)


def write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
