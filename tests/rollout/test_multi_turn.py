from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from miles.rollout.multi_turn import BadToolCall, ToolCall, parse_tool_calls
from miles.types import Completion, FinishReason, GenerateRequest, TrainShare
from tests.rollout.scripted_engine import EOS, ScriptedEngine, complete
from tests.rollout.small_run import MakeArgs, Start

ROW = {"prompt": "What is 2+3?", "label": "5", "tools": [{"type": "function", "function": {"name": "add", "parameters": {}}}]}


def script(executor: Any, turns: list[str], reason: FinishReason = FinishReason.STOP) -> Any:
    """An engine's answers by turn: text, ended by the end mark (unless by length)."""

    def answer(request: GenerateRequest) -> Completion:
        turn = int(request.request_id.rstrip(".").rpartition(".")[2])
        ids = executor.tokenizer.encode(turns[min(turn, len(turns) - 1)], add_special_tokens=False)
        tokens = ids if reason is FinishReason.LENGTH else [*ids, EOS]
        limit = request.sampling.max_new_tokens
        return complete(request, tokens[:limit], reason=reason if len(tokens) <= limit else FinishReason.LENGTH)

    return answer


def settings(**more: Any) -> dict[str, Any]:
    return {
        "generate_function": "multi_turn", "tool_functions": "tests.rollout.plugs.TOOLS", "max_response_length": 400,
        "engine_max_context": 2000, "rollout_batch_size": 1, "n_samples_per_prompt": 1, **more,
    }  # fmt: skip


async def play(make_args: MakeArgs, start: Start, turns: list[str], **more: Any) -> tuple[Any, ScriptedEngine, TrainShare]:
    reason = more.pop("reason", FinishReason.STOP)
    engine = ScriptedEngine()
    executor = await start(make_args([ROW], **settings(**more)), engine)
    engine.answer = script(executor, turns, reason)
    ref = await executor.get(0)
    return executor, engine, executor.store.get(ref.shares[0])


async def test_likeliest_tokens_stand_beside_the_tokens_of_every_turn_and_nowhere_else(make_args: MakeArgs, start: Start) -> None:
    _, engine, share = await play(make_args, start, ["I add. " + call("add", {"a": 2, "b": 3}), "5"], score_centering=2)
    data, trained = share.data, share.data.loss_mask == 1
    assert len(engine.requests) == 2
    assert (data.likeliest.ids[trained, 0] == data.token_ids[trained]).all()
    assert (data.likeliest.ids[~trained] == 0).all()
    assert set(data.likeliest.logprobs[trained].flatten().tolist()) == {np.float32(-0.7)}


async def test_an_engine_that_does_not_tell_them_is_told_of(make_args: MakeArgs, start: Start) -> None:
    engine = ScriptedEngine()
    executor = await start(make_args([ROW], **settings(score_centering=2, group_retries=0)), engine)
    answer = script(executor, ["5"])
    engine.answer = lambda request: replace(answer(request), likeliest=None)
    with pytest.raises(Exception, match=r"told \(0, 0\) likeliest log-probs for 2 tokens"):
        await executor.get(0)


def call(name: str, arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.case("C31")
async def test_the_models_tokens_alone_are_trained_and_the_whole_is_the_rendered_conversation(make_args: MakeArgs, start: Start) -> None:
    first, last = "I add. " + call("add", {"a": 2, "b": 3}), "The answer is 5"
    executor, engine, share = await play(make_args, start, [first, last])
    data, tokenizer = share.data, executor.tokenizer
    written = tokenizer.decode(data.token_ids[data.loss_mask == 1].tolist(), skip_special_tokens=False)
    assert written == f"{first}<|im_end|>{last}<|im_end|>", "the end mark belongs to the turn that it ends"
    whole = tokenizer.apply_chat_template(
        [
            {"role": "user", "content": ROW["prompt"]},
            {"role": "assistant", "content": first},
            {"role": "tool", "content": "5"},
            {"role": "assistant", "content": last},
        ],
        tools=ROW["tools"],
        tokenize=False,
    )
    assert len(engine.requests) == 2
    assert data.token_ids.tolist() == tokenizer.encode(whole.rstrip("\n"), add_special_tokens=False)
    assert (data.rollout_logprobs[data.loss_mask == 0] == 0).all()
    assert (data.weight_versions[data.loss_mask == 0] == -1).all()


async def test_what_an_engine_wrote_is_never_encoded_again(make_args: MakeArgs, start: Start) -> None:
    """Tokens that the tokenizer would not choose for their text stay as they are."""
    engine = ScriptedEngine()
    executor = await start(make_args([ROW], **settings()), engine)
    odd = [token for byte in call("add", {"a": 2, "b": 3}) for token in executor.tokenizer.encode(byte, add_special_tokens=False)]
    assert odd != executor.tokenizer.encode(call("add", {"a": 2, "b": 3}), add_special_tokens=False)

    def answer(request: GenerateRequest) -> Completion:
        return complete(request, [*odd, EOS] if request.request_id.endswith(".0.") else [300, EOS])

    engine.answer = answer
    share = executor.store.get((await executor.get(0)).shares[0])
    first, second = engine.requests
    assert second.input_ids[: len(first.input_ids) + len(odd) + 1] == [*first.input_ids, *odd, EOS]
    assert share.data.token_ids.tolist() == [*second.input_ids, 300, EOS]


async def test_turns_go_in_waves_together_and_stay_on_their_engine(make_args: MakeArgs, start: Start) -> None:
    engines = [ScriptedEngine(), ScriptedEngine()]
    executor = await start(make_args([ROW] * 3, **settings(rollout_batch_size=3, n_samples_per_prompt=2)), *engines)

    def answer(request: GenerateRequest) -> Completion:
        place, turn = request.request_id.rstrip(".").split(".")[-2:]
        wants = int(turn) <= int(place)  # sibling 0 has two turns, sibling 1 three
        text = call("add", {"a": 1, "b": 1}) if wants else "done"
        return complete(request, [*executor.tokenizer.encode(text, add_special_tokens=False), EOS])

    for engine in engines:
        engine.answer = answer
    await executor.get(0)
    sizes = [[len(members) for members in engine.waves.values()] for engine in engines]
    assert sizes == [[4, 4, 2], [2, 2, 1]]
    assert list(engines[0].waves) == ["r0.0.w0", "r0.0.w1", "r0.0.w2"]
    seeds = [request.sampling.seed for engine in engines for request in engine.requests]
    assert len(set(seeds)) == len(seeds)


@pytest.mark.case("C51")
async def test_a_tool_that_hangs_costs_its_own_group_and_the_others_go_on_without_it(make_args: MakeArgs, start: Start) -> None:
    engine = ScriptedEngine()
    args = make_args([ROW] * 4, **settings(rollout_batch_size=3, n_samples_per_prompt=2, sample_timeout=0.4, group_retries=0))
    executor = await start(args, engine)

    def answer(request: GenerateRequest) -> Completion:
        group, _, place, turn = request.request_id.split("-g")[1].rstrip(".").split(".")
        tool = call("hangs", {}) if (group, place) == ("1", "0") else call("add", {"a": 1, "b": 1})
        text = tool if int(turn) < 3 else "done"
        return complete(request, [*executor.tokenizer.encode(text, add_special_tokens=False), EOS])

    engine.answer = answer
    ref = await asyncio.wait_for(executor.get(0), 20)
    assert ref.group_indices == [0, 2, 3]
    assert ref.metrics["rollout/groups_dropped/timeout"] == 1
    assert [len(members) for name, members in engine.waves.items() if name.startswith("r0.0.")] == [6, 5, 5, 5]


@pytest.mark.case("C35")
@pytest.mark.parametrize("arguments", ['{"a":1', "[1,2]", "7", "null", ""])
@pytest.mark.parametrize("quoted", [False, True])
async def test_bad_arguments_come_back_as_an_error_message(make_args: MakeArgs, start: Start, arguments: str, quoted: bool) -> None:
    inner = json.dumps(arguments) if quoted else arguments
    bad = '<tool_call>{"name": "add", "arguments": ' + inner + "}</tool_call>"
    executor, engine, share = await play(make_args, start, [bad, "I give up"])
    shown = executor.tokenizer.decode(engine.requests[1].input_ids, skip_special_tokens=False)
    assert "error:" in shown
    assert share.data.loss_mask.sum() == len(executor.tokenizer.encode(bad + "I give up", add_special_tokens=False)) + 2


@pytest.mark.case("C35")
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (call("subtract", {}), "error: there is no tool 'subtract'; there are add, exits, fails, hangs, search"),
        (call("fails", {}), "error: RuntimeError: the disk is full"),
        (call("fails", {"how": "exit"}) + call("fails", {"how": "stop"}), "error: RuntimeError: it called for an exit: SystemExit: 3"),
        (call("fails", {"how": "stop"}) + call("exits", {}), "error: SystemExit: 3"),
        (call("fails", {"how": "half"}) + call("fails", {"how": "endless"}), "error: UnicodeEncodeError"),
        (call("add", {"a": 1}), "error: TypeError"),
        (call("search", {"query": "x"}), '["x", "found"]'),
        ('<tool_call>{"name": "add"', "error: the tool call is not closed"),
        ("<tool_call></tool_call>", "error: the tool call is not JSON"),
        (call("add", {"a": 1, "b": 1}) + call("add", {"a": 2, "b": 2}), "tool\n2<|im_end|>\n<|im_start|>tool\n4"),
    ],
)
async def test_what_the_model_gets_to_see(make_args: MakeArgs, start: Start, text: str, shown: str) -> None:
    executor, engine, _ = await play(make_args, start, [text, "done"])
    assert shown in executor.tokenizer.decode(engine.requests[1].input_ids, skip_special_tokens=False)


@pytest.mark.case("C35")
async def test_the_turn_limit_ends_a_model_that_only_calls(make_args: MakeArgs, start: Start) -> None:
    executor, engine, _ = await play(make_args, start, ['<tool_call>{"name": "add", "arguments": 7}</tool_call>'], max_turns=3)
    assert len(engine.requests) == 3
    assert (executor.stored[0].metrics)["rollout/truncated_share"] == 1.0


async def test_the_response_limit_counts_all_turns_and_the_tools_tokens(make_args: MakeArgs, start: Start) -> None:
    text = call("add", {"a": 1, "b": 1})
    executor, engine, share = await play(make_args, start, [text], max_turns=50, max_response_length=120)
    response = len(share.data.token_ids) - share.data.prompt_lengths[0]
    assert response <= 120
    limits = [request.sampling.max_new_tokens for request in engine.requests]
    assert limits == sorted(limits, reverse=True)
    assert share.data.loss_mask[-1] == 1, "no tool result stands at the end, where nothing answers it"
    assert executor.stored[0].metrics["rollout/truncated_share"] == 1.0


async def test_a_turn_cut_by_length_runs_no_tool(make_args: MakeArgs, start: Start) -> None:
    executor, engine, _ = await play(make_args, start, [call("add", {"a": 1, "b": 1})], reason=FinishReason.LENGTH)
    assert len(engine.requests) == 1
    assert executor.stored[0].metrics["rollout/truncated_share"] == 1.0


def test_calls_are_read_as_written() -> None:
    assert parse_tool_calls("no call") == []
    assert parse_tool_calls(call("add", {"a": 1})) == [ToolCall("add", {"a": 1})]
    assert parse_tool_calls('<tool_call>\n{"name": "now"}\n</tool_call>') == [ToolCall("now", {})]
    assert parse_tool_calls(call("add", '{"a": 1}')) == [ToolCall("add", {"a": 1})], "arguments as JSON text"
    assert [type(found) for found in parse_tool_calls('<tool_call>{"name": 3}</tool_call><tool_call>[]</tool_call>')] == [BadToolCall] * 2
    two = parse_tool_calls("<tool_call>{ <tool_call>" + json.dumps({"name": "b", "arguments": {}}) + "</tool_call>")
    assert [type(found) for found in two] == [BadToolCall, ToolCall]


async def test_a_tool_table_or_template_that_cannot_work_is_refused_at_start(make_args: MakeArgs, start: Start) -> None:
    with pytest.raises(ValueError, match=r"--tool-functions tests\.rollout\.plugs\.add is a function"):
        await start(make_args([ROW], **settings(tool_functions="tests.rollout.plugs.add")), ScriptedEngine())
