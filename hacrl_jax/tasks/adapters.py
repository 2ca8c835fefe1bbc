"""Rows as data sets publish them -> question and gold: field names, `#### 18`, floats, lists, boxed solutions."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hacrl_jax.types import UserError

Row = Mapping[str, Any]
QUESTIONS = ("problem", "question", "Problem", "Question", "prompt", "query")
ANSWERS = ("answer", "final_answer", "Answer", "expected_answer", "gold", "ground_truth")
IDS = ("id", "idx", "index", "ID")


def rows(source: str, *, subset: str | None = None, split: str = "train") -> Iterator[Row]:
    """The rows of a JSONL, JSON or Parquet file, or of a Hugging Face data set.

    Raises UserError for a source that does not exist or cannot be read.
    """
    path = Path(source).expanduser()
    if path.suffix in (".jsonl", ".ndjson"):
        return _jsonl(_existing(path))
    if path.suffix == ".json":
        return _json(_existing(path))
    if path.suffix == ".parquet":
        return _parquet(_existing(path))
    return _hub(source, subset, split)


def _existing(path: Path) -> Path:
    if not path.is_file():
        raise UserError(f"data.source: {path} does not exist")
    return path


def _jsonl(path: Path) -> Iterator[Row]:
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                yield _decoded(line, f"{path}, row {number},")


def _json(path: Path) -> Iterator[Row]:
    found = _decoded(path.read_text(encoding="utf-8"), str(path))
    if isinstance(found, dict):  # {"data": [...]} and the like: the one list in it
        lists = [value for value in found.values() if isinstance(value, list)]
        found = lists[0] if len(lists) == 1 else None
    if not isinstance(found, list):
        raise UserError(f"data.source: {path} holds neither a list of rows nor an object with one list")
    yield from found


def _decoded(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(f"data.source: {where} is not JSON: {error}") from None


def _parquet(path: Path) -> Iterator[Row]:
    try:
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(f"data.source: {path} needs pyarrow; install hacrl_jax[data]") from None
    for batch in parquet.ParquetFile(path).iter_batches():
        yield from batch.to_pylist()


def _hub(source: str, subset: str | None, split: str) -> Iterator[Row]:
    try:
        import datasets
    except ImportError:
        raise UserError(f"data.source: data set {source} needs `datasets`; install hacrl_jax[data]") from None
    try:
        if (Path(source) / "dataset_info.json").is_file() or (Path(source) / "dataset_dict.json").is_file():
            loaded = datasets.load_from_disk(source)
            found = loaded[split] if isinstance(loaded, datasets.DatasetDict) else loaded
        else:
            found = datasets.load_dataset(source, subset, split=split)
    except Exception as error:  # the library raises a dozen kinds, all about the name, the split or the network
        reason = " ".join(str(error).split())
        raise UserError(f"data.source: {source} (subset {subset}, split {split}): {reason}") from None
    yield from found


def messages(row: Row, fields: Mapping[str, str], instruction: str) -> tuple[tuple[str, str], ...]:
    """The conversation of a row: a question string becomes one user message; a list of messages stays.

    Raises KeyError when no known column holds a question, ValueError when it is empty.
    """
    question = _first(row, (fields["question"],) if "question" in fields else QUESTIONS)
    if isinstance(question, Sequence) and not isinstance(question, str):
        turns = [(str(turn["role"]), str(turn["content"])) for turn in question]
    else:
        context = row.get("context")  # OlympiadBench: a premise shared by several questions
        premise = f"{context}\n\n" if isinstance(context, str) and context.strip() else ""
        turns = [("user", f"{premise}{question}" if str(question).strip() else "")]
    if not turns or not turns[-1][1].strip():
        raise ValueError("empty question")
    if instruction:
        role, content = turns[-1]
        turns[-1] = (role, content.rstrip() + ("" if instruction[0].isspace() else "\n") + instruction)
    return tuple(turns)


def gold(row: Row, fields: Mapping[str, str]) -> str:
    """The gold answer of a row as text, whatever form it was published in; "" where it has none.

    Raises KeyError when no known column holds an answer.
    """
    if "answer" in fields:
        return _answer_text(_first(row, (fields["answer"],)))
    reward_model = row.get("reward_model")  # verl's parquet files
    if isinstance(reward_model, Mapping) and "ground_truth" in reward_model:
        return _answer_text(reward_model["ground_truth"])
    for column in ANSWERS:
        if row.get(column) is not None:
            return _answer_text(row[column])
    if isinstance(row.get("solution"), str):  # MATH and Minerva: the answer is the solution's last box
        return last_box(row["solution"]) or ""
    raise KeyError(f"no answer among the columns {', '.join(map(str, row))}")


def last_box(text: str) -> str | None:
    """The content of the last complete box of a solution."""
    from hacrl_jax.tasks.verify import boxes

    found = boxes(text)
    return found[-1] if found else None


def integer_id(row: Row, fields: Mapping[str, str]) -> int | None:
    """The row's own id, where it is an integer that fits."""
    for column in (fields["id"],) if "id" in fields else IDS:
        value = row.get(column)
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
            return value
    return None


def _first(row: Row, columns: Sequence[str]) -> Any:
    for column in columns:
        value: Any = row
        for part in column.split("."):  # dotted names reach into nested columns
            value = value.get(part) if isinstance(value, Mapping) else None
        if value is not None:
            return value
    raise KeyError(f"no {' or '.join(columns)} among the columns {', '.join(map(str, row))}")


def _answer_text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value)
    if isinstance(value, float):
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return ", ".join(_answer_text(part) for part in value)
    text = str(value)
    if "####" in text:  # GSM8K
        text = text.rpartition("####")[2]
    return (
        _undollared(text).lstrip(" ").rstrip()
    )  # a leading tab or form feed is a broken \\theta or \\frac: data.py says


def _undollared(text: str) -> str:
    """Math delimiters removed: `$69$,$84$` -> `69,84`. A dollar sign as money is written \\$ in these data sets."""
    if len(re.findall(r"(?<!\\)\$", text)) % 2:
        return text
    return re.sub(r"(?<!\\)\$", "", text)
