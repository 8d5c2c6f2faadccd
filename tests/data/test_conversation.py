import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.conversation import mask_conversation

TALK = [
    {"role": "system", "content": "S"},
    {"role": "user", "content": "U1"},
    {"role": "assistant", "content": "A1"},
    {"role": "user", "content": "U2 A1 A2"},
    {"role": "assistant", "content": "A2"},
]
END = {"chatml": "<|im_end|>", "thinking": "<|im_end|>", "headers": "<|eot|>", "inst": "</s>", "plain": ""}
EOS = {"headers": "<|eot|>", "inst": "</s>"}


def styled(tokenizers, style, **how):
    return tokenizers(style, eos=EOS.get(style, "<|im_end|>"), **how)


def written(tokenizer, ids, mask):
    """The masked-in runs, decoded."""
    runs, last = [], 0
    for token, learned in zip(ids, mask, strict=True):
        if learned and not last:
            runs.append([])
        if learned:
            runs[-1].append(token)
        last = learned
    return [tokenizer.decode(run) for run in runs]


@pytest.mark.case("C31")
@pytest.mark.parametrize("style", END)
@pytest.mark.parametrize("bos", [True, False])
def test_only_what_the_assistant_wrote_is_learned(tokenizers, style, bos):
    tokenizer = styled(tokenizers, style, bos=bos)
    talk = TALK[1:] if style == "inst" else TALK
    ids, mask = mask_conversation(tokenizer, talk)
    lead = " " if style == "inst" else ""
    end = END[style]
    assert [run.removeprefix(lead).rstrip("\n") for run in written(tokenizer, ids, mask)] == ["A1" + end, "A2" + end]
    whole = tokenizer.apply_chat_template(talk, return_dict=False)
    wants_one = bos and whole[0] != 1
    assert ids == ([1] if wants_one else []) + whole
    assert len(mask) == len(ids)
    assert ids.count(1) == int(bos or style in ("headers", "inst"))


@pytest.mark.case("C31")
def test_reasoning_is_learned_where_it_is_rendered(tokenizers):
    tokenizer = tokenizers("thinking")
    for last in ({"content": "<think>\nhm\n</think>\n\nA2"}, {"content": "A2", "reasoning_content": "hm"}):
        talk = [*TALK[:2], {"role": "assistant", "content": "<think>\nold\n</think>\n\nA1"}, TALK[3], {"role": "assistant", **last}]
        ids, mask = mask_conversation(tokenizer, talk)
        assert written(tokenizer, ids, mask) == ["A1<|im_end|>", "<think>\nhm\n</think>\n\nA2<|im_end|>"]
        assert ids == tokenizer.apply_chat_template(talk, return_dict=False)


@pytest.mark.case("C31")
def test_tool_calls_are_learned_and_tool_results_are_not(tokenizers):
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1, "b": [2]}}}
    talk = [
        TALK[1],
        {"role": "assistant", "content": "", "tool_calls": [call, call]},
        {"role": "tool", "content": "3 add A1"},
        {"role": "assistant", "content": "A1"},
    ]
    tools = [{"type": "function", "function": {"name": "add"}}]
    ids, mask = mask_conversation(tokenizers(), talk, tools)
    text = '\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": [2]}}\n</tool_call>'
    assert written(tokenizers(), ids, mask) == [text + text + "<|im_end|>", "A1<|im_end|>"]
    assert ids == tokenizers().apply_chat_template(talk, tools=tools, return_dict=False)


@pytest.mark.case("C31")
@pytest.mark.parametrize("style", ["chatml", "headers", "plain", "thinking"])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_talk(tokenizers, style, data):
    """Lengths of what is learned follow from each message alone, whatever the others say."""
    text = st.text(st.sampled_from("A1 U2the.\n:"), min_size=1, max_size=8).filter(lambda t: t == t.strip())
    roles = data.draw(st.lists(st.sampled_from(["user", "assistant"]), min_size=1, max_size=6).filter(lambda r: "assistant" in r))
    talk = [{"role": role, "content": data.draw(text)} for role in roles]
    tokenizer = styled(tokenizers, style)
    ids, mask = mask_conversation(tokenizer, talk)
    assert ids == tokenizer.apply_chat_template(talk, return_dict=False)
    learned = tokenizer.decode([token for token, m in zip(ids, mask, strict=True) if m])
    wanted = "".join(m["content"] + END[style] for m in talk if m["role"] == "assistant")
    assert "".join(learned.split()) == "".join(wanted.split())  # "plain" may share a token with the white space around a message


@pytest.mark.parametrize(
    ("talk", "reason"),
    [
        ([TALK[1]], "nothing to learn from"),
        ([], "empty list"),
        ("only text", "nothing to learn from"),
        ([{"role": "oracle", "content": "x"}], "oracle"),
    ],
)
def test_what_cannot_be_learned_from(tokenizers, talk, reason):
    with pytest.raises(ValueError, match=reason):
        mask_conversation(tokenizers(), talk)


def test_an_assistant_that_the_template_leaves_out_is_no_example(tokenizers):
    mute = tokenizers(template="{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}")
    with pytest.raises(ValueError, match="nothing that the assistant says"):
        mask_conversation(mute, TALK)


def test_arrays_as_parquet_gives_them(tokenizers):
    assert mask_conversation(tokenizers(), np.array(TALK, dtype=object)) == mask_conversation(tokenizers(), TALK)
