import json
import os
import subprocess
import sys

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest

from miles.config.data import DataSection
from miles.config.model import ModelSection
from miles.data.tokenizer import load_tokenizer, render_prompt

TWO = "2+2?"
TEMPLATED = DataSection()
VERBATIM = DataSection(apply_chat_template=False)


@pytest.fixture
def from_parquet(tmp_path):
    def read(value):
        path = tmp_path / "one.parquet"
        pyarrow.parquet.write_table(pyarrow.table({"prompt": [value]}), path)
        return pyarrow.parquet.read_table(path).to_pandas()["prompt"][0]

    return read


@pytest.mark.case("C25")
def test_every_form_of_a_prompt_renders_to_the_same_ids(tokenizers, from_parquet):
    tokenizer = tokenizers()
    messages = [{"role": "user", "content": TWO}]
    wanted = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    array = from_parquet(messages)
    assert isinstance(array, np.ndarray)
    forms = [
        TWO,
        np.str_(TWO),
        messages,
        tuple(messages),
        array,
        np.array(messages, dtype=object),
        [{"role": "user", "content": [{"type": "text", "text": TWO}]}],
        [{"role": "user", "content": [{"type": "text", "text": "2+"}, {"type": "text", "text": "2?"}]}],
        [{"role": "user", "content": [TWO]}],
        [{"role": "user", "content": np.array([{"type": "text", "text": TWO}], dtype=object)}],
        [{"role": "user", "content": TWO, "tool_calls": None, "name": None}],
        from_parquet([{"role": "user", "content": [{"type": "text", "text": TWO}]}]),
    ]
    assert [render_prompt(tokenizer, form, None, TEMPLATED) for form in forms] == [wanted] * len(forms)


@pytest.mark.case("C25")
@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ([{"role": "oracle", "content": TWO}], "message 1 has the role 'oracle'; known are"),
        ([{"role": "user", "content": TWO}, {"content": TWO}], "message 2 has the role None"),
        ([], "empty list"),
        ("", "empty"),
        ([{"role": "user", "content": ""}], "empty"),
        (None, "a null, not a string or a list of messages"),
        (7, "a number"),
        ({"role": "user", "content": TWO}, "a table, not a string or a list"),
        ([TWO], "message 1 is a string, not a table"),
        ([{"role": "user", "content": 4}], "content is a number"),
        ([{"role": "user", "content": [{"type": "image", "url": "x"}]}], "a content part of type 'image'"),
    ],
)
def test_a_bad_prompt_is_told_why(tokenizers, prompt, reason):
    with pytest.raises(ValueError, match=reason):
        render_prompt(tokenizers(), prompt, None, TEMPLATED)


@pytest.mark.case("C25")
def test_without_templating_text_goes_verbatim_and_lists_are_refused(tokenizers):
    for text in [TWO, " lead\n\ntail ", "<|im_start|>x<|im_end|>", "héé 😀"]:
        ids = render_prompt(tokenizers(), text, None, VERBATIM)
        assert tokenizers().decode(ids) == text
        assert render_prompt(tokenizers(None), text, None, VERBATIM) == ids
    for prompt in [[{"role": "user", "content": TWO}], np.array([TWO], dtype=object)]:
        with pytest.raises(ValueError, match="a list, and --no-apply-chat-template takes only strings"):
            render_prompt(tokenizers(), prompt, None, VERBATIM)
    with pytest.raises(ValueError, match="has no chat template; use --no-apply-chat-template"):
        render_prompt(tokenizers(None), TWO, None, TEMPLATED)
    with pytest.raises(ValueError, match="the chat template refuses the messages: only user and assistant"):
        render_prompt(tokenizers("inst"), [{"role": "system", "content": "S"}, {"role": "user", "content": TWO}], None, TEMPLATED)


@pytest.mark.case("C29")
@pytest.mark.parametrize("style", ["headers", "inst", "chatml", "plain"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("templated", [True, False])
@pytest.mark.parametrize("text", [TWO, "<s>" + TWO])
def test_exactly_one_bos_where_the_model_wants_one(tokenizers, style, bos, templated, text):
    tokenizer = tokenizers(style, bos=bos)
    ids = render_prompt(tokenizer, text if not templated else TWO, None, TEMPLATED if templated else VERBATIM)
    in_template = templated and style in ("headers", "inst")
    written = not templated and text.startswith("<s>")
    assert ids.count(1) == int(bos or in_template or written)
    assert 1 not in ids[1:]


def test_tools_and_template_arguments_reach_the_template(tokenizers):
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number"}}}}]
    ids = render_prompt(tokenizers(), TWO, tools, TEMPLATED)
    assert '"name": "add"' in tokenizers().decode(ids)
    with_nulls = [{**tools[0], "strict": None}]
    assert render_prompt(tokenizers(), TWO, np.array(with_nulls, dtype=object), TEMPLATED) == ids
    assert render_prompt(tokenizers(), TWO, json.dumps(tools), TEMPLATED) == ids
    with pytest.raises(ValueError, match="tools is a table"):
        render_prompt(tokenizers(), TWO, tools[0], TEMPLATED)
    thinking = tokenizers("thinking")
    off = render_prompt(thinking, TWO, None, DataSection(chat_template_kwargs={"enable_thinking": False}))
    assert thinking.decode(off).endswith("assistant\n<think>\n\n</think>\n\n")
    assert thinking.decode(render_prompt(thinking, TWO, None, TEMPLATED)).endswith("assistant\n")


def test_a_prompt_that_ends_with_the_assistant_is_continued(tokenizers):
    ids = render_prompt(tokenizers(), [{"role": "user", "content": TWO}, {"role": "assistant", "content": "It is"}], None, TEMPLATED)
    assert tokenizers().decode(ids).endswith("<|im_start|>assistant\nIt is")


def test_loading(tokenizers, tmp_path):
    tokenizers().save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelSection(hf_checkpoint=str(tmp_path)))
    assert render_prompt(loaded, TWO, None, TEMPLATED) == render_prompt(tokenizers(), TWO, None, TEMPLATED)
    empty = tmp_path / "empty"
    empty.mkdir()
    for name in ["", "/no/such/place", "./no", "random:tiny", str(empty)]:
        with pytest.raises(ValueError, match="--hf-checkpoint"):
            load_tokenizer(ModelSection(hf_checkpoint=name))
    (empty / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"no tokenizer in .*empty': neither tokenizer.json nor any of tokenizer.model"):
        load_tokenizer(ModelSection(hf_checkpoint=str(empty)))


def test_a_hub_that_nobody_reaches_is_said_at_once(tmp_path):
    code = """
from miles.config.model import ModelSection
from miles.data.tokenizer import load_tokenizer
try:
    load_tokenizer(ModelSection(hf_checkpoint="no/such"))
except ValueError as error:
    print(error)
"""
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.startswith("--hf-checkpoint: 'no/such' is neither a directory, nor in the local hub cache, nor found on the hub: ")


def test_data_and_rewards_import_without_torch(tokenizers, tmp_path):
    tokenizers().save_pretrained(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "2+2?", "label": "4"}\n')
    code = f"""
import importlib, pkgutil, sys
import miles.data, miles.rewards
for room in (miles.data, miles.rewards):
    for module in pkgutil.iter_modules(room.__path__, room.__name__ + "."):
        importlib.import_module(module.name)
from miles.config.data import DataSection
from miles.config.model import ModelSection
from miles.data.dataset import load_prompts
from miles.data.tokenizer import load_tokenizer
from miles.data.conversation import mask_conversation
from miles.rewards.math_answer import grade
tokenizer = load_tokenizer(ModelSection(hf_checkpoint={str(tmp_path)!r}))
load_prompts({str(tmp_path / "p.jsonl")!r}, tokenizer, DataSection())
mask_conversation(tokenizer, [{{"role": "assistant", "content": "A1"}}])
assert grade("1/2", "0.5") == 1.0
print([name for name in ("torch", "ray", "sglang") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "[]", done.stderr
