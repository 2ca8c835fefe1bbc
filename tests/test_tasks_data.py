"""Problems from every published form, and batches: epochs, hosts, resume."""

import json

import numpy as np
import pytest

from hacrl_jax.config import ArithmeticConfig, DataConfig
from hacrl_jax.tasks import data
from hacrl_jax.types import Problem, UserError


def numbered(count):
    return [Problem(id=i, messages=(("user", f"q{i}"),), gold=str(i), source="t") for i in range(count)]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def ids(batches):
    return [[problem.id for problem in batch] for batch in batches]


@pytest.mark.parametrize(("count", "batch"), [(10, 5), (10, 4), (7, 3), (101, 10), (6, 6), (13, 12)])
def test_every_pass_holds_every_problem_once_in_an_order_of_its_own(count, batch):
    epochs = 4
    found = ids(data.batches(numbered(count), batch=batch, seed=3, epochs=epochs))
    assert all(len(each) == batch == len(set(each)) for each in found)  # no problem twice in a batch
    stream = [each for row in found for each in row]
    passes = [stream[start : start + count] for start in range(0, epochs * count, count)]
    assert all(sorted(each) == list(range(count)) for each in passes)
    assert len({tuple(each) for each in passes}) == epochs
    assert len(found) == data.steps_of(count, batch=batch, epochs=epochs)


@pytest.mark.parametrize("hosts", [2, 3])
def test_hosts_share_the_batches_of_one_host(hosts):
    problems = numbered(17)
    whole = ids(data.batches(problems, batch=6, seed=1, epochs=3))
    shares = [ids(data.batches(problems, batch=6, seed=1, epochs=3, host=host, hosts=hosts)) for host in range(hosts)]
    assert [[each for part in parts for each in part] for parts in zip(*shares, strict=True)] == whole


def test_resume_in_the_middle_of_a_pass_continues_exactly():
    problems = numbered(23)
    batches = data.batches(problems, batch=4, seed=5)
    for _ in range(8):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    expected = ids(next(batches) for _ in range(40))
    fresh = data.batches(problems, batch=4, seed=5)
    fresh.set_state(state)
    assert ids(next(fresh) for _ in range(40)) == expected


def test_resume_after_many_passes_does_not_replay_them():
    batches = data.batches(numbered(101), batch=100, seed=0)
    batches.set_state({"next_index": 5000})
    assert len(set(ids([next(batches)])[0])) == 100


def test_seeds_differ_and_repeat():
    orders = [ids(data.batches(numbered(50), batch=10, seed=seed, epochs=1)) for seed in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]


def test_batch_mistakes_are_named():
    with pytest.raises(UserError, match=r"rollout\.prompts"):
        data.batches(numbered(3), batch=4, seed=0)
    with pytest.raises(UserError, match="hosts"):
        data.batches(numbered(9), batch=4, seed=0, hosts=3)


@pytest.mark.parametrize(
    ("row", "question", "gold"),
    [
        ({"problem": "p", "solution": r"so \boxed{\frac{1}{2}}", "level": "Level 5", "type": "A"}, "p", r"\frac{1}{2}"),
        ({"problem": "p", "solution": "s", "answer": "p - q", "unique_id": "test/1.json"}, "p", "p - q"),
        ({"question": "q", "answer": "It is <<1+1=2>>2\n#### 2,125"}, "q", "2,125"),
        ({"id": 0, "problem": "p", "answer": 27.0, "question": "p"}, "p", "27"),
        ({"id": 60, "problem": "p", "answer": "025"}, "p", "025"),
        ({"ID": "2024-I-1", "Problem": "p", "Answer": 204, "Solution": "s"}, "p", "204"),
        ({"problem": "p", "solution": r"\boxed{4.5e33} \mathrm{erg} \simeq 1", "idx": 1}, "p", "4.5e33"),
        ({"question": "q", "context": "c", "final_answer": ["$69$,$84$"], "unit": None}, "c\n\nq", "69,84"),
        ({"question": "q", "context": None, "final_answer": ["2"]}, "q", "2"),
        ({"prompt": [{"role": "user", "content": "q"}], "reward_model": {"ground_truth": "34"}}, "q", "34"),
        ({"problem": "p", "answer": 0.5}, "p", "0.5"),
    ],
)
def test_published_forms(tmp_path, row, question, gold):
    problems, report = data.problems(DataConfig(source=write(tmp_path / "d.jsonl", [row])))
    assert problems[0].messages == (("user", question),)
    assert problems[0].gold == gold
    assert (report.rows, report.kept, dict(report.dropped)) == (1, 1, {})


@pytest.mark.parametrize(
    ("name", "rows"),
    [("math500", 500), ("gsm8k_test", 1319), ("gsm8k_train", 7473), ("amc23", 40), ("aime24", 30),
     ("minerva_math", 272), ("olympiadbench", 675)],
)  # fmt: skip
def test_shared_data_sets_load_whole(shared, name, rows):
    problems, report = data.problems(DataConfig(source=str(shared / "data" / f"{name}.jsonl")))
    assert (report.rows, report.kept, len(problems)) == (rows, rows, rows)
    assert len({problem.id for problem in problems}) == rows
    assert all(0 <= problem.id < 2**31 for problem in problems)


def test_json_and_parquet_and_saved_data_sets_read_alike(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i), "extra": None} for i in range(5)]
    sources = [write(tmp_path / "a.jsonl", rows)]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    (tmp_path / "b.json").write_text(json.dumps({"version": 1, "data": rows}))
    sources += [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    parquet = pytest.importorskip("pyarrow.parquet", reason="parquet files need pyarrow")
    import pyarrow

    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "a.parquet")
    sources.append(str(tmp_path / "a.parquet"))
    datasets = pytest.importorskip("datasets", reason="saved data sets need datasets")
    datasets.Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    sources.append(str(tmp_path / "saved"))
    read = [data.problems(DataConfig(source=source, name="same"))[0] for source in sources]
    assert all(each == read[0] for each in read)
    assert [problem.gold for problem in read[0]] == ["0", "1", "2", "3", "4"]


def test_field_names_instruction_and_limit(tmp_path):
    source = write(tmp_path / "d.jsonl", [{"text": "q", "meta": {"key": str(i)}, "n": 7 - i} for i in range(4)])
    config = DataConfig(
        source=source, fields={"question": "text", "answer": "meta.key", "id": "n"}, instruction="Box it.", limit=3
    )
    problems, report = data.problems(config)
    assert [(p.id, p.gold) for p in problems] == [(7, "0"), (6, "1"), (5, "2")]
    assert problems[0].messages[-1][1] == "q\nBox it."
    assert report.rows == 3


BAD = [
    ({"question": "q", "answer": ""}, "empty gold answer"),
    ({"question": "q", "answer": "\frac{1}{2}"}, "control character"),  # a single backslash in JSON
    ({"question": "q", "answer": "\theta"}, "control character"),
    ({"question": "q", "answer": "(1, 2"}, "unparseable"),
    ({"question": "", "answer": "1"}, "unreadable"),
    ({"question": "q"}, "unreadable"),
    ({"answer": "1"}, "unreadable"),
]


@pytest.mark.parametrize(("row", "reason"), BAD)
def test_bad_rows_are_refused_and_named_unless_allowed(tmp_path, row, reason):
    source = write(tmp_path / "d.jsonl", [{"question": "ok", "answer": "1"}, row, {"question": "ok", "answer": "2"}])
    with pytest.raises(UserError, match=rf"1 {reason}.*row 1"):
        data.problems(DataConfig(source=source))
    problems, report = data.problems(DataConfig(source=source, allow_bad_rows=True))
    assert [p.id for p in problems] == [0, 2]  # ids do not move when a row is dropped
    assert (report.rows, report.kept) == (3, 2)
    assert [len(lines) for lines in report.dropped.values()] == [1]


def test_source_mistakes_are_one_line(tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"question": "q", "answer": "1"}\n{oops\n')
    for source, said in (
        (str(tmp_path / "none.jsonl"), "does not exist"),
        (str(tmp_path / "bad.jsonl"), "bad.jsonl, row 2"),
    ):
        with pytest.raises(UserError, match=said) as raised:
            data.problems(DataConfig(source=source))
        assert "\n" not in str(raised.value)


def test_arithmetic_is_a_source_like_others():
    config = DataConfig(source="arithmetic", arithmetic=ArithmeticConfig(size=32))
    problems, report = data.problems(config)
    assert len(problems) == report.kept == 32
    assert len({problem.id for problem in problems}) == 32
    held_out, _ = data.problems(config, "test")
    assert not {p.messages for p in problems} & {p.messages for p in held_out}


def test_fingerprint_sees_order_and_gold():
    problems = numbered(4)
    prints = {data.fingerprint(each) for each in (problems, problems[::-1], problems[:3])}
    assert len(prints) == 3
    assert data.fingerprint(problems) == data.fingerprint(numbered(4))
    assert np.unique([problem.id for problem in problems]).size == 4
