"""Several turns with tools: the model writes tool calls into its text, their results come back as tokens that are not trained.

Tokens that an engine wrote are never decoded and encoded again: a turn's context is the ids so far, and only the text that
the chat template puts between two turns of the model is encoded, on its own.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import logging
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from miles.data.tokenizer import render_messages
from miles.plugins import load
from miles.protocols import GenerateCall
from miles.rewards.daemon_thread import DaemonThreads
from miles.rewards.failure import text_of
from miles.rollout.context import RolloutContext
from miles.rollout.generate import append_completion, append_environment
from miles.types import FinishReason, Sample, SampleStatus

logger = logging.getLogger(__name__)

OPEN, CLOSE = "<tool_call>", "</tool_call>"
CALL = re.compile(rf"{OPEN}(.*?)(?:{CLOSE}|(?={OPEN})|\Z)", re.DOTALL)
STAND_IN = "stand-in-for-the-answer"
"""Takes the place of the model's text when the template renders what follows it."""


class BadToolCall(ValueError):
    """Text between tool_call marks that cannot be run; the message goes to the model."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    name: str
    arguments: dict[str, Any]


class MultiTurn:
    """A GenerateFn. A sample ends when a turn calls no tool (completed), or at max_turns or a length limit (truncated).

    Tools are those of `tool_functions`: {name: function}, sync (run in a thread, which is left to itself when it hangs) or async,
    called with the arguments as keywords; what they return is shown to the model as text, and so is the error of one that raises.
    """

    def __init__(self, context: RolloutContext):
        args = context.args
        self.tokenizer = context.tokenizer
        self.template_kwargs = args.chat_template_kwargs
        self.max_turns = args.max_turns
        self.max_tokens = context.sampling.max_new_tokens
        self.max_context = args.engine_max_context
        self.tools: Mapping[str, Callable[..., Any]] = load(args.tool_functions, setting="--tool-functions") if args.tool_functions else {}
        if not isinstance(self.tools, Mapping):
            raise ValueError(f"--tool-functions {args.tool_functions} is a {type(self.tools).__name__}, not a table {{name: function}}")
        self.limit = args.sample_timeout
        self.threads: DaemonThreads | None = None
        self.continuation(["ok"], None)  # a template that cannot show tool results is refused here

    async def __call__(self, sample: Sample, generate: GenerateCall) -> None:
        ids = sample.prompt_ids
        for turn in range(self.max_turns):
            room = self.max_tokens - len(sample.response_ids)
            completion = await generate(ids, turn=turn, max_new_tokens=room)
            append_completion(sample, completion)
            ids = ids + completion.token_ids  # a new list: an engine in this process may still hold the old one
            if completion.finish_reason is FinishReason.LENGTH:
                sample.status = SampleStatus.TRUNCATED
                return
            calls = parse_tool_calls(self.tokenizer.decode(completion.token_ids, skip_special_tokens=False))
            if not calls:
                sample.status = SampleStatus.COMPLETED
                return
            if turn + 1 == self.max_turns:
                break
            results = [await self.run(call) for call in calls]
            between = self.continuation(results, sample.tools, last_token=completion.token_ids[-1] if completion.token_ids else None)
            if len(sample.response_ids) + len(between) >= self.max_tokens or len(ids) + len(between) >= self.max_context:
                break
            append_environment(sample, between)
            ids = ids + between
        sample.status = SampleStatus.TRUNCATED

    async def run(self, call: ToolCall | BadToolCall) -> str:
        """The tool's result as text; whatever goes wrong is told to the model and never leaves here."""
        if isinstance(call, BadToolCall):
            return f"error: {call}"
        if call.name not in self.tools:
            return f"error: there is no tool {call.name!r}; there are {', '.join(sorted(self.tools)) or 'none'}"
        tool = self.tools[call.name]
        try:
            if inspect.iscoroutinefunction(tool):
                result = await tool(**call.arguments)
            else:
                self.threads = self.threads or DaemonThreads()
                result = await self.threads.run(partial(tool, **call.arguments), limit=self.limit)
            text = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str)
            text.encode()  # half of a character is no text
        except (asyncio.CancelledError, GeneratorExit):
            raise
        except BaseException as error:  # the border to the user's tool
            logger.info("tool %s failed: %s", call.name, text_of(error))
            return f"error: {text_of(error)}"
        return text

    def continuation(self, results: list[str], tools: list[dict[str, Any]] | None, last_token: int | None = None) -> list[int]:
        """Ids of what the chat template writes between the model's text and its next turn.

        `last_token`: what the model ended its turn with; if that is the template's end mark, it is not written twice.
        """
        messages = [
            {"role": "user", "content": "question"},
            {"role": "assistant", "content": STAND_IN},
            *({"role": "tool", "content": result} for result in results),
        ]
        text = render_messages(self.tokenizer, messages, tools, self.template_kwargs, add_generation_prompt=True)
        _, found, after = text.partition(STAND_IN)
        if not found or not all(result.strip() in after for result in results):
            raise ValueError("--generate-function multi_turn: the chat template does not show tool messages after an assistant's")
        ids: list[int] = self.tokenizer.encode(after, add_special_tokens=False)
        return ids[1:] if ids and ids[0] == last_token else ids


def parse_tool_calls(text: str) -> list[ToolCall | BadToolCall]:
    """Calls in the Hermes and Qwen form: <tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them."""
    calls: list[ToolCall | BadToolCall] = []
    for match in CALL.finditer(text):
        closed = match.group(0).endswith(CLOSE)
        try:
            calls.append(_read(match.group(1).strip() if closed else None))
        except BadToolCall as problem:
            calls.append(problem)
    return calls


def _read(body: str | None) -> ToolCall:
    if body is None:
        raise BadToolCall(f"the tool call is not closed with {CLOSE}")
    call = _json(body, "the tool call")
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadToolCall('a tool call is an object with "name" and "arguments"')
    arguments = call.get("arguments", {})
    if isinstance(arguments, str):
        arguments = _json(arguments, "arguments")
    if not isinstance(arguments, dict):
        raise BadToolCall(f'"arguments" is an object with the parameters by name, not {json.dumps(arguments)[:80]}')
    return ToolCall(call["name"], arguments)


def _json(text: str, what: str) -> Any:
    try:
        return json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise BadToolCall(f"{what} is not JSON: {error}") from None
