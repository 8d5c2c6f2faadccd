import json
import logging
import re

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from miles.config.data import DataSection
from miles.data.dataset import BadRowError, FirstRows, check_prompts, load_prompts
from miles.data.tokenizer import render_prompt

ROWS = [
    {"prompt": "1+1?", "label": "2", "metadata": {"level": 1}},
    {"prompt": [{"role": "user", "content": "1+2?"}], "label": "3"},
    {"prompt": "1+3?"},
]


def write(path, rows):
    """A file of the kind that the name's ending says."""
    if path.suffix == ".jsonl":
        path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    elif path.suffix == ".parquet":
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    else:
        datasets.Dataset.from_list(rows).save_to_disk(path)
    return str(path)


@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet", "saved"])
def test_every_kind_of_file_gives_the_same_rows(tokenizers, tmp_path, name):
    rows = [{"prompt": [{"role": "user", "content": f"1+{i}?"}], "label": str(i + 1), "metadata": {"level": i}} for i in range(3)]
    read = load_prompts(write(tmp_path / name, rows), tokenizers(), DataSection())
    assert [list(row.prompt_ids) for row in read.rows] == [render_prompt(tokenizers(), row["prompt"], None, DataSection()) for row in rows]
    assert [(row.prompt, row.label, row.metadata, row.tools) for row in read.rows] == [
        (row["prompt"], row["label"], row["metadata"], None) for row in rows
    ]
    assert [row.origin[-1] for row in read.rows] == ["1", "2", "3"]


def test_mixed_forms_and_missing_fields(tokenizers, tmp_path):
    read = load_prompts(write(tmp_path / "d.jsonl", ROWS), tokenizers(), DataSection())
    assert [row.label for row in read.rows] == ["2", "3", None]
    assert [row.metadata for row in read.rows] == [{"level": 1}, {}, {}]
    renamed = [{"question": "1+1?", "gold": 2, "info": '{"a": [1]}'}]
    args = DataSection(prompt_key="question", label_key="gold", metadata_key="info")
    (row,) = load_prompts(write(tmp_path / "r.jsonl", renamed), tokenizers(), args).rows
    assert (row.label, row.metadata) == (2, {"a": [1]})


@pytest.mark.case("C21")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ('{"prompt": "a", "label": "1"\n', "not JSON"),
        ("[1, 2]\n", "a list, not an object"),
        ("7\n", "a number, not an object"),
        ("null\n", "a null, not an object"),
        ('{"label": "1"}\n', "no field 'prompt' .--prompt-key.; there are label"),
        ('{"prompt": ""}\n', "field 'prompt': the prompt is empty"),
        ('{"prompt": null}\n', "the prompt is a null"),
        ('{"prompt": [{"role": "oracle", "content": "x"}]}\n', "role 'oracle'"),
        ('{"prompt": "x", "tools": 3}\n', "tools is a number"),
        ('{"prompt": "x", "tools": "[{"}\n', "tools: not JSON"),
        ('{"prompt": "x", "metadata": [1]}\n', "field 'metadata': a list"),
        ('{"prompt": "x", "metadata": "{"}\n', "field 'metadata': not JSON"),
        ('{"prompt": "x\x00"\n', "not JSON"),
        ("[" * 100000 + "\n", "nested more than 100 levels deep"),
        ('{"prompt": "a", "label": 1, "label": 2}\n', "the key 'label' stands twice in .*'prompt', 'a'"),
        ('{"prompt": "a", "metadata": {"x": {"y": 1, "y": 1}}}\n', "the key 'y' stands twice"),
        ('{"prompt": "a", "metadata": "{\\"x\\": 1, \\"x\\": 1}"}\n', "field 'metadata': the key 'x' stands twice"),
        ('{"prompt": "a\\ud800b"}\n', "field 'prompt': not text: .*surrogates not allowed"),
        ('{"prompt": "a", "label": {"x": "\\uDC00"}}\n', "field 'label': not text"),
        ('{"prompt": "a", "label": ' + "9" * 5000 + "}\n", "not JSON: Exceeds the limit"),
        ('{"prompt": "a", "metadata": ' + '{"a":' * 900 + "1" + "}" * 901 + "\n", "field 'metadata': nested more than 100 levels deep"),
        ('{"prompt": "a", "label": ' + "[" * 101 + "]" * 101 + "}\n", "field 'label': nested more than 100 levels deep"),
        ('{"prompt": ' + "[" * 900 + "]" * 900 + "}\n", "field 'prompt': nested more than 100 levels deep"),
        ('{"prompt": "a", "label": ["\\ud83d\\ude00", ' + "[" * 960 + "]" * 960 + "]}\n", "nested more than 100 levels deep"),
    ],
    ids=lambda value: value[:30],
)
def test_a_bad_row_is_told_with_file_line_and_reason_or_skipped(tokenizers, tmp_path, line, reason, caplog):
    path = write(tmp_path / "d.jsonl", [ROWS[0], line, ROWS[2]])
    with pytest.raises(BadRowError, match=rf"d\.jsonl, line 2: .*{reason}"):
        load_prompts(path, tokenizers(), DataSection())
    with caplog.at_level(logging.WARNING):
        read = load_prompts(path, tokenizers(), DataSection(skip_bad_rows=True))
    assert (len(read.rows), read.num_skipped) == (2, 1)
    assert "skipped 1 bad rows" in caplog.text
    assert "line 2" in caplog.text


@pytest.mark.case("C21")
@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet", "saved"])
@pytest.mark.parametrize("lazy", [False, True])
def test_every_kind_of_file_tells_the_row_and_the_field(tokenizers, tmp_path, name, lazy):
    rows = [{"prompt": [{"role": role, "content": "x"}]} for role in ("user", "oracle", "user")]
    path = write(tmp_path / name, rows)
    lazy = lazy and name != "d.json"
    with pytest.raises(BadRowError, match=rf"{name}, (line|row) 2: field 'prompt': message 1 has the role 'oracle'"):
        load_prompts(path, tokenizers(), DataSection(), lazy=lazy)
    read = load_prompts(path, tokenizers(), DataSection(skip_bad_rows=True), lazy=lazy)
    assert [row.origin.split()[1] for row in read.rows] == ["1", "3"]
    assert read.num_skipped == 1


@pytest.mark.case("C21")
def test_bytes_that_are_no_text_and_blank_lines_and_bom(tokenizers, tmp_path):
    path = tmp_path / "d.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n\n   \n{"prompt": "\xff"}\n{"prompt": "b"}')
    with pytest.raises(BadRowError, match="line 4: not JSON: 'utf-8' codec"):
        load_prompts(str(path), tokenizers(), DataSection())
    assert [row.origin for row in load_prompts(str(path), tokenizers(), DataSection(skip_bad_rows=True)).rows] == ["line 1", "line 5"]


@pytest.mark.case("C21")
@pytest.mark.parametrize("lazy", [False, True])
def test_a_parquet_value_that_is_no_text_is_told_by_row_and_field(tokenizers, tmp_path, lazy):
    path = str(tmp_path / "d.parquet")
    prompts = pyarrow.Array.from_buffers(pyarrow.utf8(), 3, [None, *pyarrow.array([b"a", b"\xff\xfe", b"c"]).buffers()[1:]])
    pyarrow.parquet.write_table(pyarrow.table({"label": [1, 2, 3], "prompt": prompts}), path)
    with pytest.raises(BadRowError, match=r"d\.parquet, row 2: field 'prompt': 'utf-8' codec"):
        load_prompts(path, tokenizers(), DataSection(), lazy=lazy)
    read = load_prompts(path, tokenizers(), DataSection(skip_bad_rows=True), lazy=lazy)
    assert [row.label for row in read.rows] == [1, 3]


def test_a_parquet_file_that_is_none_or_has_a_column_twice_is_told(tokenizers, tmp_path):
    table = pyarrow.Table.from_arrays([pyarrow.array(["a"]), pyarrow.array(["b"])], names=["prompt", "prompt"])
    pyarrow.parquet.write_table(table, tmp_path / "twice.parquet")
    with pytest.raises(ValueError, match=r"twice\.parquet: several columns are called prompt"):
        load_prompts(str(tmp_path / "twice.parquet"), tokenizers(), DataSection())
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a" * 100] * 10}), tmp_path / "d.parquet")
    (tmp_path / "cut.parquet").write_bytes((tmp_path / "d.parquet").read_bytes()[:-20])
    with pytest.raises(ValueError, match=r"cut\.parquet: not a readable parquet file"):
        load_prompts(str(tmp_path / "cut.parquet"), tokenizers(), DataSection())


@pytest.mark.case("C23")
@pytest.mark.parametrize("name", ["d.jsonl", "d.parquet"])
def test_length_is_that_of_the_ids_that_are_sent(tokenizers, tmp_path, name, caplog):
    tokenizer = tokenizers("chatml", bos=True)
    empty = len(render_prompt(tokenizer, "x", None, DataSection())) - 1
    tools = [{"type": "function", "function": {"name": f"f{i}", "description": "no"}} for i in range(8)]

    def row(tokens, tools=None):
        return {"prompt": "x" * (tokens - empty), "tools": tools}

    rows = [row(50), row(50, tools), row(64), row(65)]
    lengths = [len(render_prompt(tokenizer, r["prompt"], r["tools"], DataSection())) for r in rows]
    assert lengths[:1] + lengths[2:] == [50, 64, 65]
    assert lengths[1] > 200
    path = write(tmp_path / name, rows)
    with caplog.at_level(logging.WARNING):
        read = load_prompts(path, tokenizer, DataSection(max_prompt_length=64))
    assert [len(r.prompt_ids) for r in read.rows] == [50, 64]
    assert [r.origin[-1] for r in read.rows] == ["1", "3"]
    assert read.num_too_long == 2
    assert "dropped 2 prompts longer than max_prompt_length 64" in caplog.text
    assert len(load_prompts(path, tokenizer, DataSection()).rows) == 4


def test_batches_of_rendering_keep_order_and_ids(tokenizers, tmp_path, monkeypatch):
    monkeypatch.setattr("miles.data.dataset.RENDERED_AT_ONCE", 3)
    rows = [{"prompt": "x" * (i % 5 + 1), "label": i} for i in range(11)]
    read = load_prompts(write(tmp_path / "d.jsonl", rows), tokenizers("inst", bos=True), DataSection())
    assert [row.label for row in read.rows] == list(range(11))
    for row, given in zip(read.rows, rows, strict=True):
        assert list(row.prompt_ids) == render_prompt(tokenizers("inst", bos=True), given["prompt"], None, DataSection())


@pytest.mark.parametrize("name", ["d.parquet", "saved"])
def test_nulls_that_columns_fill_in_are_not_sent(tokenizers, tmp_path, name):
    tools = [
        {"function": {"name": "add", "parameters": {"a": "number"}}},
        {"function": {"name": "cut", "parameters": {"text": "string"}}},
    ]
    rows = [{"prompt": [{"role": "user", "content": "1+1?"}], "tools": [tool]} for tool in tools]
    rows.append({"prompt": [{"role": "user", "content": "1+1?", "name": "Ann"}], "tools": None})
    read = load_prompts(write(tmp_path / name, rows), tokenizers(), DataSection())
    assert [row.tools for row in read.rows] == [[tools[0]], [tools[1]], None]
    assert read.rows[0].prompt == rows[0]["prompt"]
    assert list(read.rows[0].prompt_ids) == render_prompt(tokenizers(), rows[0]["prompt"], rows[0]["tools"], DataSection())


@pytest.mark.case("C11")
@pytest.mark.parametrize("name", ["d.jsonl", "d.json", "d.parquet", "saved"])
def test_labels_arrive_as_they_are(tokenizers, tmp_path, name):
    for labels in (["A", "B", "C", "D"], [1, 2, 3, 4], [0.5, 1.0, -2.0, 4.0]):
        rows = [{"prompt": "x", "label": label} for label in labels]
        path = tmp_path / f"{type(labels[0]).__name__}"
        path.mkdir()
        assert [row.label for row in load_prompts(write(path / name, rows), tokenizers(), DataSection()).rows] == labels


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("none.jsonl", None, "no file"),
        ("", None, "no file"),
        ("e.jsonl", "", "no prompts to use: the file is empty"),
        ("e.jsonl", "\n \n", "the file is empty"),
        ("e.json", "[]", "the file is empty"),
        ("e.json", "{}", "a table, not a list of rows"),
        ("e.json", "[1", "e.json: not JSON"),
        ("e.json", '[{"prompt": "a", "prompt": "b"}]', "e.json: the key 'prompt' stands twice"),
        ("e.parquet", "PAR1 no", "not a readable parquet file"),
        ("e.txt", "x", "not a .jsonl, .json or .parquet file"),
        ("e.jsonl", '{"prompt": "long enough to be too long"}\n', "no prompts to use; 1 dropped as longer than --max-prompt-length 5"),
        ("e.jsonl", "nonsense\n", "1 bad rows skipped, the first: .*line 1: not JSON"),
    ],
)
def test_a_file_without_prompts_is_told_why(tokenizers, tmp_path, name, content, reason):
    if content is not None:
        (tmp_path / name).write_text(content)
    path = str(tmp_path / name) if name else ""
    with pytest.raises(ValueError, match=reason):
        load_prompts(path, tokenizers(), DataSection(max_prompt_length=5, skip_bad_rows=True))


def test_directories(tokenizers, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="not a directory written by"):
        load_prompts(str(tmp_path / "empty"), tokenizers(), DataSection())
    datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS[:1])}).save_to_disk(tmp_path / "splits")
    with pytest.raises(ValueError, match=r"several splits; name one: .*splits/train"):
        load_prompts(str(tmp_path / "splits"), tokenizers(), DataSection())
    assert len(load_prompts(str(tmp_path / "splits" / "train"), tokenizers(), DataSection()).rows) == 1


def test_templating_off(tokenizers, tmp_path):
    path = write(tmp_path / "d.jsonl", [{**ROWS[0], "tools": [{"type": "function"}]}, *ROWS[1:]])
    with pytest.raises(BadRowError, match="line 2: field 'prompt': the prompt is a list, and --no-apply-chat-template"):
        load_prompts(path, tokenizers(None), DataSection(apply_chat_template=False))
    read = load_prompts(path, tokenizers(None), DataSection(apply_chat_template=False, skip_bad_rows=True))
    assert [tokenizers().decode(row.prompt_ids) for row in read.rows] == ["1+1?", "1+3?"]
    assert read.rows[0].tools is None, "no template shows them"


def test_numpy_formats_of_a_saved_data_set_do_not_leak(tokenizers, tmp_path):
    datasets.Dataset.from_list([{"prompt": "x", "label": 3}]).with_format("numpy").save_to_disk(tmp_path / "d")
    (row,) = load_prompts(str(tmp_path / "d"), tokenizers(), DataSection()).rows
    assert row.label == 3
    assert not isinstance(row.label, np.generic)


def test_the_early_look_says_what_loading_would_say(tokenizers, tmp_path):
    path = write(tmp_path / "d.jsonl", ROWS)
    assert check_prompts(path, DataSection()) == FirstRows(3, 2, is_all=True)
    assert check_prompts(path, DataSection(), most=2) == FirstRows(2, 2, is_all=False)
    bad = {
        "no field": [{"text": "a"}],
        "not JSON": ['{"prompt": \n'],
        "role": [{"prompt": [{"role": "nobody", "content": "a"}]}],
        "empty prompt": [{"prompt": ""}],
        "metadata": [{"prompt": "a", "metadata": [1]}],
        "nothing": [],
    }
    for template in (True, False):
        args = DataSection(apply_chat_template=template)
        for name, rows in bad.items():
            path = write(tmp_path / f"{name}.jsonl", rows)
            with pytest.raises(ValueError) as late:
                load_prompts(path, tokenizers(), args)
            with pytest.raises(ValueError) as early:
                check_prompts(path, args)
            assert str(early.value) == str(late.value)
    skipping = DataSection(skip_bad_rows=True)
    assert check_prompts(write(tmp_path / "mixed.jsonl", [{"text": "a"}, {"prompt": "b"}]), skipping) == FirstRows(1, 0, is_all=True)
    with pytest.raises(ValueError, match="no prompts to use; 2 bad rows skipped, the first: "):
        check_prompts(write(tmp_path / "all.jsonl", [{"text": "a"}, {"text": "b"}]), skipping)


@pytest.mark.parametrize("lazy", [False, True])
def test_prompts_that_leave_no_room_for_an_answer_are_left_out_and_told(tokenizers, tmp_path, caplog, lazy):
    path = write(tmp_path / "d.jsonl", [{"prompt": "2"}, {"prompt": "2 " * 40}, {"prompt": "2 " * 50}])
    read = load_prompts(path, tokenizers(), DataSection(), lazy=lazy, room=30)
    assert [row.origin for row in read.rows] == ["line 1"]
    told = r"dropped 2 prompts that leave no room for an answer in --engine-max-context 30 \(the first: line 2, \d+ tokens\); raise it"
    assert re.search(told, caplog.text)
    with pytest.raises(ValueError, match=r"no prompts to use; dropped 3 prompts .* --engine-max-context 1 "):
        load_prompts(path, tokenizers(), DataSection(), lazy=lazy, room=1)
