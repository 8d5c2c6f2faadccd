"""From the prompt's text to the ids that are trained: what the engine got and wrote, and nothing else."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from miles.types import Completion, FinishReason, GenerateRequest
from tests.data.conftest import TEMPLATES, make_tokenizer
from tests.rollout.scripted_engine import EOS, ScriptedEngine, complete
from tests.rollout.small_run import MakeArgs, Start
from tests.rollout.test_multi_turn import ROW, call
from tests.rollout.test_multi_turn import settings as multi_turn


@pytest.mark.case("C29")
@pytest.mark.parametrize("style", ["headers", "inst", "chatml", None])
@pytest.mark.parametrize("bos", [True, False])
async def test_the_engine_and_the_trainer_see_the_same_ids_with_one_bos(
    make_args: MakeArgs, start: Start, tmp_path: Path, style: str | None, bos: bool
) -> None:
    tokenizer = make_tokenizer(TEMPLATES[style] if style else None, bos=bos)
    tokenizer.save_pretrained(tmp_path / "model")
    engine = ScriptedEngine()
    rows = [{"prompt": "2+2?", "label": "4"}, {"prompt": "the thesis", "label": "5"}]
    args = make_args(rows, hf_checkpoint=str(tmp_path / "model"), apply_chat_template=style is not None)
    executor = await start(args, engine)
    (share,) = (executor.store.get(ref) for ref in (await executor.get(0)).shares)
    wanted = int(bos or style in ("headers", "inst"))
    trained = [
        share.data.token_ids[start : start + length].tolist()
        for start, length in zip(share.data.offsets[:-1], share.data.prompt_lengths, strict=True)
    ]
    assert sorted(trained) == sorted(request.input_ids for request in engine.requests)
    for ids in trained:
        assert ids[:2].count(1) == ids.count(1) == wanted
        assert (ids[0] == 1) == bool(wanted)


@pytest.mark.case("C33")
@pytest.mark.parametrize(
    ("tokens", "reason"),
    [([300, 301, EOS], FinishReason.STOP), ([EOS], FinishReason.STOP), ([300, 301, 302], FinishReason.LENGTH), ([300], FinishReason.STOP)],
    ids=["end token", "end token alone", "length", "stop string"],
)
@pytest.mark.parametrize("function", ["single_turn", "multi_turn"])
async def test_an_end_token_is_trained_if_it_was_written_and_never_invented(
    make_args: MakeArgs, start: Start, tokens: list[int], reason: FinishReason, function: str
) -> None:
    def answer(request: GenerateRequest) -> Completion:
        completion = complete(request, tokens, reason=reason)
        completion.logprobs = [-0.25 * (place + 1) for place in range(len(tokens))]
        return completion

    executor = await start(make_args([ROW], **multi_turn(generate_function=function)), ScriptedEngine(answer))
    data = executor.store.get((await executor.get(0)).shares[0]).data
    response = data.prompt_lengths[0]
    assert data.token_ids[response:].tolist() == tokens
    assert data.loss_mask[response:].tolist() == [1] * len(tokens)
    assert data.rollout_logprobs[response:].tolist() == [-0.25 * (place + 1) for place in range(len(tokens))]


def split_at_will(tokenizer: Any, text: str, rng: random.Random) -> list[int]:
    """Ids that decode to `text` but need not be those that the tokenizer would give."""
    ids: list[int] = []
    while text:
        cut = rng.randint(1, 3)
        ids += tokenizer.encode(text[:cut], add_special_tokens=False)
        text = text[cut:]
    return ids


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=st.lists(st.text("the quick 17é,", min_size=1, max_size=12), min_size=1, max_size=3), seed=st.integers(0, 999))
async def test_what_the_engine_wrote_is_never_encoded_again(make_args: MakeArgs, start: Start, texts: list[str], seed: int) -> None:
    """An engine that cuts its text into tokens as no tokenizer would: context and training data hold exactly its ids."""
    rng = random.Random(seed)
    engine = ScriptedEngine()
    executor = await start(make_args([ROW], **multi_turn(max_response_length=900)), engine)
    turns = [text + call("add", {"a": 1, "b": 2}) for text in texts] + ["done " + texts[0]]
    wrote = [[*split_at_will(executor.tokenizer, text, rng), EOS] for text in turns]
    engine.answer = lambda request: complete(request, wrote[int(request.request_id.rstrip(".").rpartition(".")[2])])
    data = executor.store.get((await executor.get(0)).shares[0]).data
    ids, mask = data.token_ids.tolist(), data.loss_mask.tolist()
    assert [token for token, trained in zip(ids, mask, strict=True) if trained] == [token for turn in wrote for token in turn]
    assert len(engine.requests) == len(wrote)
    for number, request in enumerate(engine.requests):
        assert request.input_ids == ids[: len(request.input_ids)]
        assert ids[len(request.input_ids) : len(request.input_ids) + len(wrote[number])] == wrote[number]
    assert any(executor.tokenizer.encode(text, add_special_tokens=False) != turn[:-1] for text, turn in zip(turns, wrote, strict=True))
