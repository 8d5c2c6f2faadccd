import json
import logging
import tracemalloc
from collections import Counter

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from miles.config.cli import resolve
from miles.config.data import DataSection
from miles.config.validate import SettingsError
from miles.data import files
from miles.data.dataset import BadRowError, load_prompts
from miles.data.mix import load_source
from tests.data.test_dataset import write


def made(tokenizer, *flags):
    return load_source(resolve(["--n-samples-per-prompt", "2", *flags], check=False), tokenizer)


@pytest.fixture
def two(tmp_path):
    easy = write(tmp_path / "easy.jsonl", [{"prompt": f"e{i}", "label": i, "level": i % 3} for i in range(6)])
    hard = write(tmp_path / "hard.json", [{"prompt": f"h{i}", "label": i, "metadata": {"level": 9 - i}} for i in range(4)])
    return easy, hard


def score(group, reward):
    for sample in group.samples:
        sample.reward = reward
    return group


@pytest.mark.parametrize("flags", [["--prompt-data", "{0}", "{1}"], ["--prompt-data", "{0}", "--prompt-data", "hard={1}"]])
def test_sets_are_named_by_file_or_by_hand_and_groups_say_theirs(tokenizers, two, flags):
    source = made(tokenizers(), *(flag.format(*two) for flag in flags))
    groups = [source.take() for _ in range(20)]
    assert Counter(group.data_set for group in groups) == {"easy": 12, "hard": 8}
    assert all(
        sample.data_set == group.data_set == {"e": "easy", "h": "hard"}[sample.prompt[0]] for group in groups for sample in group.samples
    )
    assert made(tokenizers(), "--prompt-data", two[0]).take().data_set == ""


def test_weights_decide_and_the_cursor_finds_the_same_draws(tokenizers, two):
    flags = ["--prompt-data", *two, "--prompt-weights", "easy=0.2", "hard=0.8"]
    source = made(tokenizers(), *flags)
    first = [source.take() for _ in range(7)]
    state = json.loads(json.dumps(source.state()))
    rest = [source.take() for _ in range(23)]
    assert Counter(group.data_set for group in first + rest) == {"easy": 6, "hard": 24}
    resumed = made(tokenizers(), *flags)
    resumed.load_state(state)
    assert [resumed.take() for _ in range(23)] == rest


def test_another_mix_than_the_checkpoint_had_is_told(tokenizers, two, caplog):
    state = made(tokenizers(), "--prompt-data", *two, "--prompt-weights", "easy=0.2", "hard=0.8").state()
    with caplog.at_level(logging.WARNING):
        made(tokenizers(), "--prompt-data", *two, "--prompt-weights", "easy=0.5", "hard=0.5").load_state(state)
    assert "weights [0.2, 0.8] -> [0.5, 0.5]" in caplog.text


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--prompt-weights", "easy=1"], "one weight for each of easy, hard"),
        (["--prompt-weights", "easy=1", "hard=0"], "finite and above 0"),
        (["--prompt-weights", "easy=1", "hard=nan"], "finite"),
        (["--prompt-weights", "easy=1", "hard=1", "--curriculum", "pass_rate"], "choose one"),
        (["--prompt-data", "a/b=x.jsonl"], "no slash"),
        (["--prompt-data", "none.jsonl"], "none.jsonl: no such file"),
        (["--prompt-data", "x/easy.jsonl", "y/easy.jsonl"], "easy is given twice; write NAME=y/easy.jsonl"),
        (["--prompt-data", "y/easy.jsonl"], "easy is given twice"),
        (["--advantage-estimator", "sft", "--lazy-data"], "supervised training"),
        (["--lazy-data"], r"--lazy-data: .*hard\.json can only be read whole"),
    ],
)
def test_what_cannot_be_meant_is_refused(two, flags, reason):
    with pytest.raises(SettingsError, match=reason):
        resolve(["--prompt-data", *two, *flags])


def test_a_set_that_would_never_be_drawn_is_refused(tokenizers, two):
    with pytest.raises(ValueError, match="--prompt-weights: easy would get none of the 10 draws"):
        made(tokenizers(), "--prompt-data", *two, "--prompt-weights", "easy=0.001", "hard=1")


def test_a_curriculum_by_field_of_the_row_or_of_its_metadata(tokenizers, two):
    source = made(tokenizers(), "--prompt-data", *two, "--curriculum", "level")
    for _ in range(2):
        levels = [
            {"e": i % 3, "h": 9 - i}[group.samples[0].prompt[0]]
            for group in [source.take() for _ in range(10)]
            for i in [group.samples[0].label]
        ]
        assert levels == [0, 0, 1, 1, 2, 2, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("row", "reason"), [({}, "missing"), ({"level": "hard"}, "'hard'"), ({"level": True}, "True"), ({"level": float("nan")}, "nan")]
)
def test_a_row_without_its_difficulty_is_told(tokenizers, tmp_path, row, reason):
    path = write(tmp_path / "d.jsonl", [{"prompt": "x", "level": 1}, {"prompt": "y", **row}])
    with pytest.raises(BadRowError, match=rf"d\.jsonl, line 2: field 'level' \(--curriculum\): {reason}, not a number"):
        made(tokenizers(), "--prompt-data", path, "--curriculum", "level")


def test_a_curriculum_by_pass_rate_orders_the_next_epoch_and_survives_a_resume(tokenizers, two):
    flags = ["--prompt-data", two[0], "--curriculum", "pass_rate"]
    source, blind = made(tokenizers(), *flags), made(tokenizers(), "--prompt-data", two[0])
    first = [source.take() for _ in range(6)]
    assert [group.prompt_index for group in first] == [blind.take().prompt_index for _ in range(6)]
    for group in first:
        if group.prompt_index != 3:  # never scored
            source.note_scored(score(group, group.prompt_index / 10))
    second = [source.take() for _ in range(2)]
    state = json.loads(json.dumps(source.state()))
    source.note_scored(score(first[0], 0.99))  # too late for an epoch that has begun
    second += [source.take() for _ in range(4)]
    assert [group.prompt_index for group in second] == [3, 5, 4, 2, 1, 0]
    resumed = made(tokenizers(), *flags)
    resumed.load_state(state)
    assert [resumed.take().prompt_index for _ in range(4)] == [4, 2, 1, 0]
    for each in (source, resumed):
        each.note_scored(score(each.draw(0), 0.99))
    assert [source.take().prompt_index for _ in range(6)] == [resumed.take().prompt_index for _ in range(6)]


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet", "saved"])
def test_lazy_rows_are_the_rows(tokenizers, tmp_path, name):
    rows = [{"prompt": "x" * (i % 7 + 1), "label": i, "metadata": {"i": i}} for i in range(40)]
    path = write(tmp_path / name, rows)
    args = resolve(["--max-prompt-length", "30"], check=False)
    held = load_prompts(path, tokenizers(), args)
    lazy = load_prompts(path, tokenizers(), args, lazy=True)
    assert len(lazy.rows) == len(held.rows)
    assert [(row.prompt, list(row.prompt_ids), row.label, row.metadata) for row in lazy.rows] == [
        (row.prompt, list(row.prompt_ids), row.label, row.metadata) for row in held.rows
    ]
    assert lazy.rows[-1].label == held.rows[-1].label
    assert [row.label for row in lazy.rows[3:5]] == [row.label for row in held.rows[3:5]]


def test_parquet_is_read_by_row_groups_of_which_only_some_are_kept(tokenizers, tmp_path, monkeypatch, caplog):
    rows = [{"prompt": f"p{i}", "label": i} for i in range(50)]
    path = str(tmp_path / "d.parquet")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    lazy = load_prompts(path, tokenizers(), DataSection(), lazy=True).rows
    order = np.random.default_rng(0).permutation(50)
    assert [lazy[int(i)].label for i in order] == order.tolist()
    assert len(lazy._file._kept) == 8
    monkeypatch.setattr(files, "KEPT_BYTES", 300)
    monkeypatch.setattr(files, "LARGE_GROUP", 10)
    lazy = load_prompts(path, tokenizers(), DataSection(), lazy=True).rows
    assert [lazy[i].label for i in (0, 49, 8, 1, 0)] == [0, 49, 8, 1, 0]
    assert sum(table.nbytes for table in lazy._file._kept.values()) <= 300
    assert len(lazy._file._kept) >= 1
    assert "a smaller row_group_size" in caplog.text


def test_lazy_data_takes_no_memory_for_its_rows(tokenizers, tmp_path):
    path = tmp_path / "big.jsonl"
    payload = "y" * 10_000
    with path.open("w") as file:
        for i in range(4000):
            file.write(json.dumps({"prompt": f"p{i}", "label": i, "metadata": {"text": payload}}) + "\n")
    assert path.stat().st_size > 40e6
    assert_little_memory(tokenizers, tmp_path, path, {"text": payload})


def test_a_lazy_parquet_file_takes_no_memory_for_its_rows(tokenizers, tmp_path, monkeypatch):
    path = tmp_path / "big.parquet"
    payload = {"text": "y" * 10_000}
    table = pyarrow.Table.from_pylist([{"prompt": f"p{i}", "label": i, "metadata": payload} for i in range(4000)])
    pyarrow.parquet.write_table(table, path, row_group_size=100, use_dictionary=False, compression="none")
    del table
    assert path.stat().st_size > 40e6
    monkeypatch.setattr(files, "KEPT_BYTES", 4 << 20)
    before = pyarrow.total_allocated_bytes()
    assert_little_memory(tokenizers, tmp_path, path, payload, lambda: pyarrow.total_allocated_bytes() - before)


def assert_little_memory(tokenizers, tmp_path, path, metadata, beside=lambda: 0):
    made(tokenizers(), "--prompt-data", write(tmp_path / "small.jsonl", [{"prompt": "x"}]))  # what the first use loads
    tracemalloc.start()
    source = made(tokenizers(), "--prompt-data", str(path), "--lazy-data")
    assert all(source.take().samples[0].metadata == metadata for _ in range(20))
    held, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert held < 1e6
    assert peak < 20e6
    assert beside() < 10e6


@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_lazy_data_that_changes_under_the_run_is_told(tokenizers, tmp_path, name):
    path = write(tmp_path / name, [{"prompt": "abc"}, {"prompt": "def"}])
    source = made(tokenizers(), "--prompt-data", path, "--lazy-data")
    source.take()
    write(tmp_path / name, [{"prompt": "other"}] * 3)
    with pytest.raises(BadRowError, match=rf"{name} has changed since"):
        source.take()
