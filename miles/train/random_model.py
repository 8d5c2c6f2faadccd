"""Seeded random models of known shapes, with a tokenizer, made on first use: `--hf-checkpoint random:tiny`.

`python -m miles.train.random_model random:tiny 0` makes one and prints where it lies.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from miles.train.random_place import PREFIX, place_of


def _qwen3(vocabulary: int, size: int, inner: int, layers: int, heads: tuple[int, int, int]) -> dict[str, Any]:
    """heads: query heads, key-value heads, and the size of one."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": size,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "max_window_layers": layers,
        "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1],
        "head_dim": heads[2],
        "tie_word_embeddings": size < 4096,
        "max_position_embeddings": 40960,
    }


SHAPES: dict[str, dict[str, Any]] = {
    "tiny": _qwen3(512, 128, 384, 4, (4, 2, 32)),
    "tiny-4k": _qwen3(4096, 128, 384, 4, (4, 2, 32)),
    "qwen3-0.6b": _qwen3(151936, 1024, 3072, 28, (16, 8, 128)),
    "qwen3-1.7b": _qwen3(151936, 2048, 6144, 28, (16, 8, 128)),
    "qwen3-4b": _qwen3(151936, 2560, 9728, 36, (32, 8, 128)),
    "qwen3-8b": _qwen3(151936, 4096, 12288, 36, (32, 8, 128)),
}

PAD, START, END = "<|pad|>", "<|im_start|>", "<|im_end|>"
TEXT = """What is the sum of two numbers? Answer with only the number. The answer is the last number in the text.
How many apples are left when you take three of them away from ten? There are seven apples left on the table.
You are a helpful assistant. Think step by step, then give the final answer. Please write a short sentence about this.
First we add the numbers, then we subtract the smaller one from the larger one, and then we multiply by the other.
If a train leaves at nine and arrives at twelve, it was under way for three hours. What was the speed of the train?
The quick brown fox jumps over the lazy dog while the young child reads an old book in the quiet green garden.
Who wrote that letter? Where did they find it? When will it be finished? Why does water boil when it is heated?
Let x be a number such that the product of x and two is equal to eight; so the value of x must be four. Yes or no?
She said that they would come back before the end of the week, because there was something more that had to be done.
user assistant system tool question answer true false name value list function return call result error message content
"""
TEMPLATE = """
{%- if tools %}<|im_start|>system
{% if messages[0].role == 'system' %}{{ messages[0].content }}

{% endif %}You may call these functions:
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}To call one, write <tool_call>{"name": ..., "arguments": ...}</tool_call>.<|im_end|>
{% elif messages[0].role == 'system' %}<|im_start|>system
{{ messages[0].content }}<|im_end|>
{% endif %}
{%- for message in messages %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}{{ raise_exception('unknown role ' ~ message.role) }}{% endif %}
{%- if not (loop.first and message.role == 'system') %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}
{%- elif message.content %}{% for part in message.content %}{{ part.text }}{% endfor %}{% endif %}
{%- if message.tool_calls %}{% for call in message.tool_calls %}{% set call = call.function if call.function else call %}
<tool_call>{{ {"name": call.name, "arguments": call.arguments} | tojson }}</tool_call>
{%- endfor %}{% endif %}<|im_end|>
{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def resolve_checkpoint(name: str, seed: int) -> str:
    """Where the model called `name` lies: a random model is made if need be, any other name is returned as it is."""
    return str(ensure_model(name, seed)) if name.startswith(PREFIX) else name


def ensure_model(name: str, seed: int, directory: Path | None = None) -> Path:
    """The directory of the seeded random model "random:<shape>", made if it is not there yet.

    Several processes may ask at once: each makes its own and the first to finish wins. Raises ValueError for an unknown shape.
    """
    shape = name.removeprefix(PREFIX)
    if shape not in SHAPES:
        raise ValueError(f"--hf-checkpoint: no random model {shape!r}; there are {', '.join(SHAPES)}")
    target = place_of(name, seed, directory)
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    making = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    try:
        tokenizer = make_tokenizer(SHAPES[shape]["vocab_size"])
        make_model(shape, seed, tokenizer).save_pretrained(making)
        tokenizer.save_pretrained(making)
        making.chmod(0o755)
        try:
            making.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    finally:
        shutil.rmtree(making, ignore_errors=True)
    return target


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with at most `vocab_size` entries: any text goes in and comes out unchanged, digits stand alone."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXT.splitlines(keepends=True), trainer)
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, pad_token=PAD, model_max_length=4096, clean_up_tokenization_spaces=False
    )
    made.chat_template = TEMPLATE
    return made


def make_model(shape: str, seed: int, tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Weights of size 1 / sqrt(inputs), so that signals keep their size; small embeddings, so that it starts out undecided."""
    small = shape.startswith("tiny")
    config = Qwen3Config(
        **SHAPES[shape],
        rope_parameters={"rope_type": "default", "rope_theta": 10_000.0 if small else 1_000_000.0},
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    with torch.device("meta"):
        model = Qwen3ForCausalLM(config)
    generator = torch.Generator().manual_seed(seed)
    state = {}
    for name, meta in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        tensor = torch.ones(meta.shape)
        if meta.ndim == 2:
            tensor.normal_(0.0, 0.05 if "embed_tokens" in name else meta.shape[1] ** -0.5, generator=generator)
        state[name] = tensor if small else tensor.bfloat16()
    dtype = torch.float32 if small else torch.bfloat16
    model = Qwen3ForCausalLM.from_pretrained(None, config=config, state_dict=state, dtype=dtype)
    model.generation_config = GenerationConfig(eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id)
    return model


if __name__ == "__main__":
    print(ensure_model(sys.argv[1], int(sys.argv[2]) if len(sys.argv) > 2 else 0))
