import json

import pytest

from miles.rewards import ifeval

CHECKED = [
    ("keywords:existence", {"keywords": ["red", "blue sky"]}, ["Red under a blue sky."], ["red blue", "reddish blue sky", "blue sky"]),
    ("keywords:forbidden_words", {"forbidden_words": ["red"]}, ["reddish", "blue"], ["RED", "a red."]),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "at least"}, ["ha ha", "Ha, ha, ha"], ["ha", "haha"]),
    ("keywords:frequency", {"keyword": "ha", "frequency": 2, "relation": "less than"}, ["ha", "no"], ["ha ha"]),
    ("keywords:letter_frequency", {"letter": "q", "let_frequency": 2, "let_relation": "at least"}, ["Qq"], ["q", "x"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "at least"}, ["a b c", "don't do it"], ["a b", "1,2 - -"]),
    ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, ["a well-known"], ["a b c"]),
    (
        "length_constraints:number_sentences",
        {"num_sentences": 2, "relation": "at least"},
        ["One. Two!", 'He said "no." And left', "Pi is 3.14. Yes?"],
        ["One", "Pi is 3.14.", "Wait..."],
    ),
    ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, ["a\n***\nb", "a *** b"], ["a\n\nb", "a\n***\nb\n***\nc"]),
    (
        "length_constraints:nth_paragraph_first_word",
        {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "so"},
        ["a\n\nSo it is", 'a\n \n"So", he said'],
        ["So\n\na", "a\n\nsofa", "a\n\nso\n\nc", "a"],
    ),
    ("detectable_content:number_placeholders", {"num_placeholders": 2}, ["[name] and [date]"], ["[name]", "[] []"]),
    ("detectable_content:postscript", {"postscript_marker": "P.S."}, ["Bye.\nP.S. more", "Bye\n p.s. more"], ["Bye", "see P.S. above"]),
    ("detectable_format:number_bullet_lists", {"num_bullets": 2}, ["* a\n* b", "- a\n - b"], ["* a", "* a\n* b\n* c", "*a\n*b"]),
    ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, ["*a* and **b**"], ["*a*", "a * b * c *", "** **"]),
    (
        "detectable_format:multiple_sections",
        {"section_spliter": "Section", "num_sections": 2},
        ["Section 1\na\nSECTION 2\nb", "## Section 1\na\n**Section 2**"],
        ["Section 1", "Section one\nSection two"],
    ),
    ("detectable_format:constrained_response", {}, ["My answer is yes.", "Well. My answer is maybe."], ["yes", "My answer is yes and no"]),
    ("detectable_format:json_format", {}, ['{"a": 1}', '```json\n{"a": 1}\n```', "[1]"], ["{'a': 1}", 'Here: {"a": 1}', "[" * 9999]),
    ("detectable_format:title", {}, ["<<Song>>\nla"], ["<Song>", "<< >>", "<<a\nb>>"]),
    ("combination:two_responses", {}, ["a\n******\nb"], ["a", "a******a", "a******b******c", "******b"]),
    ("combination:repeat_prompt", {"prompt_to_repeat": "Why? "}, ["why? Because."], ["Because. Why?"]),
    ("startend:end_checker", {"end_phrase": "The end."}, ["So. the end.", '"So. The end."\n'], ["The end. Not.", "So"]),
    ("startend:quotation", {}, ['"so"'], ["so", '"so', '""']),
    ("change_case:english_capital", {}, ["ALL OF 3!"], ["ALL of", "123"]),
    ("change_case:english_lowercase", {}, ["all of 3!"], ["All", "123"]),
    ("change_case:capital_word_frequency", {"capital_frequency": 2, "capital_relation": "at least"}, ["NO, I said"], ["NO way"]),
    ("punctuation:no_comma", {}, ["no; none"], ["well, no"]),
]


def row(names, arguments):
    return {"instruction_id_list": names, "kwargs": arguments}


@pytest.mark.parametrize(("name", "arguments", "right", "wrong"), CHECKED, ids=lambda value: value if isinstance(value, str) else "")
def test_each_instruction(answer, name, arguments, right, wrong):
    padded = arguments | {"another": None}  # columnar files fill in nulls
    for text in right:
        assert ifeval.score(answer(text, None, metadata=row([name], [padded]))) == {"reward": 1.0, "followed": 1.0}, text
    for text in [*wrong, "", "  "]:
        assert ifeval.score(answer(text, None, metadata=row([name], [padded]))) == {"reward": 0.0, "followed": 0.0}, text


def test_every_instruction_is_tried_above():
    assert {name for name, *_ in CHECKED} == set(ifeval.CHECKS)


@pytest.mark.parametrize(
    ("text", "wanted"), [("red", (1.0, 1.0)), ("red, blue", (0.0, 0.5)), ("blue", (0.0, 0.5)), ("blue, blue", (0.0, 0.0))]
)
def test_all_of_them_and_the_share(answer, text, wanted):
    given = row(["punctuation:no_comma", "keywords:existence"], [None, {"keywords": ["red"]}])
    expected = dict(zip(("reward", "followed"), wanted, strict=True))
    for sample in (answer(text, None, metadata=given), answer(text, given), answer(text, json.dumps(given))):
        assert ifeval.score(sample) == expected
    assert ifeval.score(answer(f"<think>well, well</think><answer>{text}</answer>", given)) == expected


@pytest.mark.parametrize("label", [None, "4", 4, {"a": 1}])
def test_a_row_without_instructions_is_unscorable(answer, label):
    assert ifeval.score(answer("x", label)) is None


@pytest.mark.parametrize(
    ("names", "arguments", "reason"),
    [
        (["language:martian"], [{}], "unknown instruction 'language:martian'"),
        (["keywords:existence"], [{}], "'keywords:existence' with {}"),
        (["keywords:existence"], [{"keywords": ["a"], "more": 1}], "unexpected keyword argument 'more'"),
        (["keywords:frequency"], [{"keyword": "a", "frequency": 1, "relation": "about"}], "unknown relation 'about'"),
        (["length_constraints:number_words"], [{"num_words": "many"}], "not supported between"),
        (["punctuation:no_comma"], [], "1 names in instruction_id_list and 0 tables"),
    ],
)
def test_a_row_that_is_wrong_is_told_never_scored(answer, names, arguments, reason):
    with pytest.raises(ValueError, match=reason):
        ifeval.score(answer("x", row(names, arguments)))
