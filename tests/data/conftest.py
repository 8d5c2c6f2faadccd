"""Small tokenizers of every style, over one byte-level vocabulary."""

from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' and tools %}{{ '<|im_start|>system\n' }}"
    "{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% for call in m.tool_calls or [] %}{{ '\n<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
THINKING = (
    "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% set content = m.content %}{% set thought = m.reasoning_content or '' %}"
    "{% if m.role == 'assistant' and '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.role == 'assistant' and loop.index0 > ns.last %}{{ '<think>\n' + thought + '\n</think>\n\n' }}{% endif %}"
    "{{ content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}"
)
HEADERS_WITH_BOS = (
    "{{ bos_token }}{% for m in messages %}{{ '<|head|>' + m.role + '<|/head|>\n\n' + m.content | trim + '<|eot|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|head|>assistant<|/head|>\n\n' }}{% endif %}"
)
INST = (
    "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}{{ '[INST] ' + m.content + ' [/INST]' }}"
    "{% elif m.role == 'assistant' %}{{ ' ' + m.content + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant speak here') }}{% endif %}{% endfor %}"
)
PLAIN = (
    "{% for m in messages %}{{ m.role | upper + ': ' + m.content + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT: ' }}{% endif %}"
)
TEMPLATES = {"chatml": CHATML, "thinking": THINKING, "headers": HEADERS_WITH_BOS, "inst": INST, "plain": PLAIN}

SPECIAL = ["<|pad|>", "<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|head|>", "<|/head|>", "<|eot|>"]
MERGED = ["th", "the", "is", "Ġt", "Ġth", "Ġthe", "A1", "A2", ".Ċ", "ĊĊ"]


def make_tokenizer(template: str | None, *, bos: bool = False, eos: str = "<|im_end|>") -> PreTrainedTokenizerFast:
    """`bos`: the tokenizer itself puts <s> before every text."""
    letters = [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *MERGED]
    merges = [("t", "h"), ("th", "e"), ("i", "s"), ("Ġ", "t"), ("Ġt", "h"), ("Ġth", "e"), ("A", "1"), ("A", "2"), (".", "Ċ"), ("Ċ", "Ċ")]
    tokenizer = Tokenizer(models.BPE(vocab={letter: place for place, letter in enumerate(letters)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>" if bos or (template and "bos_token" in template) else None,
        eos_token=eos,
        pad_token="<|pad|>",
        additional_special_tokens=SPECIAL[1:],
        clean_up_tokenization_spaces=False,
    )
    made.chat_template = template
    return made


@pytest.fixture(scope="session")
def tokenizers() -> Callable[..., Any]:
    made: dict[Any, Any] = {}

    def get(style: str | None = "chatml", *, template: str | None = None, **how: Any) -> Any:
        key = (style, template, *sorted(how.items()))
        if key not in made:
            made[key] = make_tokenizer(template or (TEMPLATES[style] if style else None), **how)
        return made[key]

    return get
