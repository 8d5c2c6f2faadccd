"""Which tokens of a whole conversation the assistant wrote: supervised training's loss mask, for any chat template."""

from __future__ import annotations

import logging
import re
from copy import deepcopy
from typing import Any

from miles.config.data import DataSection
from miles.data.files import read_rows
from miles.data.tokenizer import as_messages, as_tools, render_messages, wanted_bos
from miles.types import Message

logger = logging.getLogger(__name__)

Row = tuple[list[int], list[int]]
"""Token ids of a conversation, and the loss mask over them."""

MARK = "\ue000mark\ue001"
"""Private-use characters: no template and no message holds them."""
REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")


def mask_conversation(
    tokenizer: Any, messages: Any, tools: Any = None, chat_template_kwargs: dict[str, Any] | None = None
) -> tuple[list[int], list[int]]:
    """Token ids of the conversation rendered once, and the loss mask over them.

    1 on what the assistant wrote (text, reasoning, tool calls) and on the token that ends its turn (the first special
    token that the template puts after it), 0 on everything else: headers, other roles, line breaks between turns.
    Needs no generation markers in the template: an assistant message is found as what changes in the rendered text
    when the message is replaced.

    Returns:
        (token_ids [tokens], loss_mask [tokens]).

    Raises:
        ValueError: the messages cannot be rendered, no assistant speaks, or the template hides where it does.
    """
    messages = as_messages(messages)
    if not any(message["role"] == "assistant" for message in messages):
        raise ValueError("no message of the role assistant: nothing to learn from")
    render = _Renderer(tokenizer, as_tools(tools), chat_template_kwargs)
    text = render(messages)
    spans: list[tuple[int, int]] = []
    for place, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        span = _span(render, text, messages, place)
        if span is not None:
            if spans and span[0] < spans[-1][1]:
                raise ValueError(f"message {place + 1}: the chat template does not keep assistant messages apart")
            spans.append(span)
    ids, mask = _tokens(tokenizer, text, spans)
    if not any(mask):
        raise ValueError("nothing that the assistant says is in the rendered conversation: nothing to learn from")
    return ids, mask


class _Renderer:
    def __init__(self, tokenizer: Any, tools: list[dict[str, Any]] | None, kwargs: dict[str, Any] | None):
        self._tokenizer = tokenizer
        self._tools = tools
        self._kwargs = kwargs
        added = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
        special = sorted({*tokenizer.all_special_tokens, *added}, key=len, reverse=True)
        self.special = re.compile("|".join(map(re.escape, special)) or r"(?!)")

    def __call__(self, messages: list[Message], *, add_generation_prompt: bool = False) -> str:
        return render_messages(self._tokenizer, messages, self._tools, self._kwargs, add_generation_prompt=add_generation_prompt)


def _span(render: _Renderer, text: str, messages: list[Message], place: int) -> tuple[int, int] | None:
    """Characters [start, end) of `text` that message `place` wrote, its end marker included; None when it is not rendered."""
    region = _difference(text, render(_marked(messages, place)))
    if region is None:
        return None
    start, end = region
    if _reasons(messages[place]):
        start = _turn_start(render, text, messages, place, start)
    return start, end + len(_end_marker(render, text[end:], messages[: place + 1], place))


def _difference(text: str, other: str) -> tuple[int, int] | None:
    """The smallest [start, end) of `text` outside which `other` is the same."""
    if text == other:
        return None
    shorter = min(len(text), len(other))
    start = next((i for i in range(shorter) if text[i] != other[i]), shorter)
    rest = shorter - start
    same = next((i for i in range(rest) if text[-1 - i] != other[-1 - i]), rest)
    return start, len(text) - same


def _marked(messages: list[Message], place: int) -> list[Message]:
    """The conversation with every text of one message replaced; its shape stays, so that templates take the same way."""
    message = deepcopy(messages[place])
    message["content"] = MARK
    for key in REASONING_KEYS:
        if message.get(key):
            message[key] = MARK
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        function["name"] = MARK
    return [*messages[:place], message, *messages[place + 1 :]]


def _reasons(message: Message) -> bool:
    return "<think>" in message["content"] or any(message.get(key) for key in REASONING_KEYS)


def _turn_start(render: _Renderer, text: str, messages: list[Message], place: int, start: int) -> int:
    """Where the model begins to write: right after the generation prompt, before an opening reasoning tag that never changes."""
    before = render(messages[:place]) if place else ""
    asked = render(messages[:place], add_generation_prompt=True) if place else ""
    header = asked.removeprefix(before)
    found = text.rfind(header, 0, start) if header and asked.startswith(before) else -1
    return start if found < 0 else found + len(header)


def _end_marker(render: _Renderer, rest: str, upto: list[Message], place: int) -> str:
    """What ends the turn in `rest`, the text after the message: as far as the first special token that also follows it
    when the conversation ends there (so that the next turn's header is never taken for it)."""
    ending = render(upto)
    region = _difference(ending, render(_marked(upto, place)))
    tail = ending[region[1] :] if region is not None else ""
    found = render.special.search(tail)
    marker = tail[: found.end()] if found else tail.rstrip()
    return marker if rest.startswith(marker) else ""


def _tokens(tokenizer: Any, text: str, spans: list[tuple[int, int]]) -> tuple[list[int], list[int]]:
    coded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, offsets = coded["input_ids"], coded["offset_mapping"]
    mask = [0] * len(ids)
    token = 0
    for start, end in spans:
        while token < len(ids) and offsets[token][1] <= start:
            token += 1
        while token < len(ids) and offsets[token][0] < end:
            mask[token] = int(offsets[token][0] < offsets[token][1])
            token += 1
    bos = wanted_bos(tokenizer)
    return (ids, mask) if bos is None or ids[:1] == [bos] else ([bos, *ids], [0, *mask])


def load_conversations(path: str, tokenizer: Any, args: DataSection) -> list[Row]:
    """All conversations of a file, as token ids and loss mask.

    Raises ValueError with file, line and reason for the first bad row, unless skip_bad_rows leaves them out.
    """
    rows: list[Row] = []
    skipped = 0
    for origin, value in read_rows(path):
        try:
            rows.append(mask_conversation(tokenizer, *conversation(value, args), args.chat_template_kwargs or None))
        except ValueError as error:
            if not args.skip_bad_rows:
                raise ValueError(f"{path}, {origin}: {error}") from None
            skipped += 1
    if skipped:
        logger.warning("%s: skipped %d bad rows", path, skipped)
    return rows


def conversation(value: Any, args: DataSection) -> tuple[Any, Any]:
    """Messages and tools of a row: its field messages, or its prompt with its label as the answer. ValueError: neither is there."""
    if isinstance(value, Exception):
        raise ValueError(str(value))
    if not isinstance(value, dict):
        raise ValueError("not an object with fields")
    tools = value.get(args.tools_key)
    if "messages" in value:
        return value["messages"], tools
    if args.prompt_key not in value:
        raise ValueError(f"neither a field 'messages' nor {args.prompt_key!r} (--prompt-key)")
    prompt, answer = value[args.prompt_key], value.get(args.label_key)
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else list(prompt)
    return [*messages, {"role": "assistant", "content": str(answer)}] if answer is not None else messages, tools
