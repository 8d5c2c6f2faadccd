"""A small fixed tokenizer for random models: tests and examples need no download."""

from __future__ import annotations

from functools import cache
from itertools import chain

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 512
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
WORDS = """
system user assistant tool What is the answer to plus minus times equals sum of and or in it that this you are an with for as
on be not have from one two three four five six seven eight nine ten Answer only number question How many Let us think step
by So therefore because first then next total value result help please say yes no true false left right up down word letter
list
"""
TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\nTools: ' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.tool_calls or [] %}{{ '\n<tool_call>' + (call.function | tojson) + '</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@cache
def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """512 ids: 3 special ones, 256 bytes, common English words and their pieces; ChatML template; eos `<|im_end|>` (2), pad 0.

    The merges follow from WORDS alone, so every process and version builds the same one.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: place for place, token in enumerate([*SPECIAL, *alphabet])}
    merges: list[tuple[str, str]] = []
    for word in chain.from_iterable(("Ġ" + word, word) for word in WORDS.split()):
        left = word[0]
        for letter in word[1:]:
            if len(vocab) == VOCAB_SIZE:
                break
            if left + letter not in vocab:
                vocab[left + letter] = len(vocab)
                merges.append((left, letter))
            left += letter
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=SPECIAL[0],
        eos_token=SPECIAL[2],
        additional_special_tokens=[SPECIAL[1]],
        chat_template=TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=1 << 30,
    )
