"""The tokenizer and the prompts it renders. Imports no torch: the tokenizers library does the work.

transformers, whose import takes a second, comes with the first tokenizer: who only checks prompts does without.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import TemplateError

from miles.config.data import DataSection
from miles.config.model import ModelSection
from miles.plugins import load
from miles.types import Message

logger = logging.getLogger(__name__)

DEEPEST = 100
"""Levels of lists and tables in a row."""
OLD_FORMATS = ("tokenizer.model", "vocab.*", "spiece.model", "*.tiktoken", "*.bpe.*")
ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})


def load_tokenizer(args: ModelSection) -> Any:
    """The tokenizer of `args.hf_checkpoint`, a directory or a hub name.

    Reads tokenizer.json without importing torch. Checkpoints without one go through transformers' AutoTokenizer.

    Raises:
        ValueError: names --hf-checkpoint and why nothing could be loaded.
    """
    name = args.hf_checkpoint
    is_path = name.startswith(("/", ".", "~")) or name.count("/") != 1
    path = Path(name).expanduser()
    if not name or (is_path and not path.is_dir()):
        raise ValueError(f"--hf-checkpoint: no directory {name!r}")
    where = str(path) if path.is_dir() else name
    reader = "transformers.PreTrainedTokenizerFast"
    if not path.is_dir():
        _find_on_hub(name)
    elif not (path / "tokenizer.json").exists():
        if not any((path / file).exists() for file in ("tokenizer_config.json", "config.json")):
            raise ValueError(f"--hf-checkpoint: {name!r} holds neither tokenizer.json nor tokenizer_config.json nor config.json")
        if not args.trust_remote_code and not any(any(path.glob(pattern)) for pattern in OLD_FORMATS):
            raise ValueError(f"--hf-checkpoint: no tokenizer in {name!r}: neither tokenizer.json nor any of {', '.join(OLD_FORMATS)}")
        logger.info("%s has no tokenizer.json; loading its own tokenizer class, which imports torch", where)
        reader = "transformers.AutoTokenizer"
    try:
        return load(reader).from_pretrained(where, trust_remote_code=args.trust_remote_code)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"--hf-checkpoint: no tokenizer could be loaded from {name!r}: {error}") from error


def _find_on_hub(name: str) -> None:
    """Once, and for all files: transformers asks for each of them anew, for minutes where nobody answers."""
    try:
        load("huggingface_hub.snapshot_download")(name, allow_patterns=["config.json"])
    except (OSError, ValueError) as error:
        reason = next(iter(str(error).strip().splitlines()), "") or type(error).__name__
        raise ValueError(
            f"--hf-checkpoint: {name!r} is neither a directory, nor in the local hub cache, nor found on the hub: {reason}"
        ) from error


def render_prompt(tokenizer: Any, prompt: Any, tools: Any, args: DataSection) -> list[int]:
    """Token ids of one prompt, exactly as an engine gets them.

    Args:
        prompt: a string, a list of chat messages (also numpy arrays, as parquet gives them), content as text or text parts.
        tools: tool schemas for the chat template, or None.

    Raises:
        ValueError: says what is wrong with the prompt.
    """
    return encode(tokenizer, [prompt_text(tokenizer, prompt, tools, args)])[0]


def check_prompt(prompt: Any, args: DataSection) -> None:
    """Raise the ValueError that rendering would, as far as that can be told without a tokenizer."""
    prompt = plain(prompt)
    if args.apply_chat_template:
        as_messages(prompt)  # a copy is cheap beside the template
    elif not isinstance(prompt, str):
        raise ValueError(f"the prompt is a {kind(prompt)}, and --no-apply-chat-template takes only strings")
    elif not prompt:
        raise ValueError("the prompt is empty")


def prompt_text(tokenizer: Any, prompt: Any, tools: Any, args: DataSection) -> str:
    """The prompt as one text: templated, or with templating off the string as it is."""
    check_prompt(prompt, args)
    if not args.apply_chat_template:
        return str(plain(prompt))
    messages = as_messages(prompt)
    return render_messages(tokenizer, messages, as_tools(tools), args.chat_template_kwargs, add_generation_prompt=True)


def render_messages(
    tokenizer: Any,
    messages: list[Message],
    tools: list[dict[str, Any]] | None = None,
    template_kwargs: dict[str, Any] | None = None,
    *,
    add_generation_prompt: bool,
) -> str:
    """The chat template's text for `messages`. A list that ends with an assistant message is left open, to be continued."""
    if tokenizer.chat_template is None:
        raise ValueError(f"the tokenizer of {tokenizer.name_or_path!r} has no chat template; use --no-apply-chat-template")
    go_on = add_generation_prompt and messages[-1]["role"] == "assistant"
    try:
        text = tokenizer.apply_chat_template(
            messages,
            tools=tools,
            tokenize=False,
            add_generation_prompt=add_generation_prompt and not go_on,
            continue_final_message=go_on,
            **(template_kwargs or {}),
        )
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"the chat template refuses the messages: {error}") from error
    assert isinstance(text, str)
    return text


def encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Ids of each text, special tokens in the text understood, with exactly one BOS where the model wants one."""
    rows: list[list[int]] = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False)["input_ids"] if texts else []
    if (bos := wanted_bos(tokenizer)) is None:
        return rows
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in rows]


@cache
def wanted_bos(tokenizer: Any) -> int | None:
    """The id that this tokenizer puts before every text, if any."""
    bos = tokenizer.bos_token_id
    return bos if bos is not None and tokenizer("a", add_special_tokens=True)["input_ids"][:1] == [bos] else None


def as_messages(prompt: Any) -> list[Message]:
    """A prompt as chat messages: a string is one user message; content parts of type text are joined."""
    prompt = plain(prompt)
    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    if not isinstance(prompt, list):
        raise ValueError(f"the prompt is a {kind(prompt)}, not a string or a list of messages")
    if not prompt:
        raise ValueError("the prompt is an empty list of messages")
    messages = [_message(place, message) for place, message in enumerate(prompt)]
    if not any(message.get("content") or message.get("tool_calls") for message in messages):
        raise ValueError("the prompt is empty")
    return messages


def _message(place: int, message: Any) -> Message:
    where = f"message {place + 1}"
    if not isinstance(message, dict):
        raise ValueError(f"{where} is a {kind(message)}, not a table with role and content")
    message = {key: value for key, value in message.items() if value is not None}
    role = message.get("role")
    if role not in ROLES:
        raise ValueError(f"{where} has the role {role!r}; known are {', '.join(sorted(ROLES))}")
    content = message.get("content", "")
    if isinstance(content, list):
        content = "".join(_part(where, part) for part in content)
    if not isinstance(content, str):
        raise ValueError(f"{where}: content is a {kind(content)}, not text or a list of text parts")
    return {**message, "content": content}


def _part(where: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if isinstance(part, dict) and isinstance(part.get("text"), str) and part.get("type", "text") == "text":
        return str(part["text"])
    what = part.get("type") if isinstance(part, dict) else kind(part)
    raise ValueError(f"{where}: a content part of type {what!r}; only text is understood")


def as_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Tool schemas as a list of tables, or None; JSON text is read, the nulls that columnar files fill in are dropped."""
    tools = plain(tools)
    if isinstance(tools, str) and tools.strip():
        try:
            tools = plain(read_json(tools))
        except ValueError as error:
            raise ValueError(f"tools: {error}") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError(f"tools is a {kind(tools)}, not a list of schemas")
    return [without_nulls(tool) for tool in tools]


def without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_nulls(part) for key, part in value.items() if part is not None}
    return [without_nulls(part) for part in value] if isinstance(value, list) else value


def plain(value: Any, levels: int = DEEPEST) -> Any:
    """numpy arrays and scalars as lists and Python values. ValueError: nested deeper than what copies and sends a row may recurse."""
    if isinstance(value, np.ndarray):
        return plain(value.tolist(), levels)
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, list | tuple | dict) and not levels:
        raise ValueError(f"nested more than {DEEPEST} levels deep")
    if isinstance(value, list | tuple):
        return [plain(part, levels - 1) for part in value]
    if isinstance(value, dict):
        return {key: plain(part, levels - 1) for key, part in value.items()}
    return value


def read_json(text: str | bytes) -> Any:
    """ValueError: it is not JSON, or an object has a key twice, of which a reader would silently take the last."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError:
        raise ValueError(f"nested more than {DEEPEST} levels deep") from None
    except _KeyTwiceError:
        raise
    except ValueError as error:  # also text that is no UTF-8, and numbers too long to be read
        raise ValueError(f"not JSON: {error}") from None


class _KeyTwiceError(ValueError):
    pass


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) < len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise _KeyTwiceError(f"the key {twice!r} stands twice in {str(pairs)[:200]}")
    return table


def kind(value: Any) -> str:
    """What a reader of an error message calls this value."""
    names = {str: "string", list: "list", dict: "table", int: "number", float: "number", bool: "boolean", type(None): "null"}
    return names.get(type(value), type(value).__name__)
