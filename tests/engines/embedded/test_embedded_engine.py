"""The engine against transformers' own forward pass, and against itself alone."""

import asyncio
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from miles.engines.embedded.engine import EmbeddedEngine
from miles.types import Completion, FinishReason, GenerateRequest, SamplingParams


def ask(request_id: str, prompt: list[int], new: int = 16, affinity: str = "", **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id, prompt, SamplingParams(**({"max_new_tokens": new, "seed": 1, "ignore_eos": True} | sampling)), affinity
    )


def prompts(count: int, longest: int = 60, seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(2, 512, size=int(draw.integers(1, longest))).tolist() for _ in range(count)]


@torch.no_grad()
def fresh_logprobs(model: PreTrainedModel, prompt: list[int], completion: Completion, temperature: float = 1.0) -> np.ndarray:
    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0].float() / (temperature or 1.0)
    picked = logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion.token_ids)[:, None])
    return picked[:, 0].numpy()


def assert_equals_fresh_pass(model: PreTrainedModel, prompt: list[int], completion: Completion, temperature: float = 1.0) -> None:
    gap = np.abs(np.array(completion.logprobs) - fresh_logprobs(model, prompt, completion, temperature))
    assert gap.mean() < 1e-5
    assert gap.max() < 1e-4


@pytest.mark.parametrize(("temperature", "prefill_tokens"), [(1.0, 4096), (0.7, 64), (1.8, 7), (0.0, 64)])
async def test_logprobs_equal_a_fresh_forward_pass(
    start: Callable[..., EmbeddedEngine], reference: PreTrainedModel, temperature: float, prefill_tokens: int
) -> None:
    engine = await start(engine_prefill_tokens=prefill_tokens, engine_max_running=5)
    asked = [ask(f"r{i}", prompt, new=5 + 2 * i, seed=i, temperature=temperature) for i, prompt in enumerate(prompts(12))]
    for request, completion in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        assert len(completion.token_ids) == request.sampling.max_new_tokens
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.version_spans == [(0, len(completion.token_ids), 0)]
        assert_equals_fresh_pass(reference, request.input_ids, completion, temperature)


async def test_greedy_is_the_likeliest_token_of_a_fresh_pass(start: Callable[..., EmbeddedEngine], reference: PreTrainedModel) -> None:
    engine = await start()
    (prompt,) = prompts(1)
    completion = await engine.generate(ask("r", prompt, temperature=0))
    with torch.no_grad():
        logits = reference(torch.tensor([prompt + completion.token_ids])).logits[0]
    assert completion.token_ids == logits[len(prompt) - 1 : -1].argmax(-1).tolist()


async def test_a_thread_that_hangs_shows_in_health(start: Callable[..., EmbeddedEngine]) -> None:
    """Whatever it hangs in, and whether or not a request has got as far as a slot."""
    engine = await start()
    entered, leave = threading.Event(), threading.Event()

    def hangs() -> None:
        entered.set()
        leave.wait(30)

    engine._thread.post(hangs)
    assert await asyncio.to_thread(entered.wait, 30)
    task = asyncio.create_task(engine.generate(ask("r", [5, 6])))
    await asyncio.sleep(0)
    before = (await engine.health()).stuck_seconds
    deadline = time.monotonic() + 30
    while (await engine.health()).stuck_seconds < before + 0.05:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
    leave.set()
    assert len((await task).token_ids) == 16
    deadline = time.monotonic() + 30
    while (await engine.health()).stuck_seconds:
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)
