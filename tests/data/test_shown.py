from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.shown import pieces


@given(data=st.data(), text=st.text("ab 日é\U0001f600\n[]", max_size=20))
@settings(max_examples=80, deadline=None)
def test_pieces_are_the_whole_text_and_never_mix_what_is_trained_with_what_is_not(tokenizers, data, text):
    tokenizer = tokenizers()
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    mask = data.draw(st.lists(st.integers(0, 1), min_size=len(ids), max_size=len(ids)))
    found = pieces(tokenizer, ids, mask)
    assert [int(piece.trained) for piece in found for _ in range(piece.num_tokens)] == mask
    if len(set(mask)) < 2:  # a change inside a character cuts it
        assert "".join(piece.text for piece in found) == text
