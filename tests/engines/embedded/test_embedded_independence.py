"""Any mix of prompts, lengths, seeds, arrivals, aborts and pauses gives each request the tokens that it has alone."""

import asyncio
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine
from miles.engines.embedded.sampling import uniforms
from miles.types import Completion, FinishReason, GenerateRequest, SamplingParams

CONTEXT = 64
POOL = [[(7 * i + 3 * j * j) % 509 + 2 for j in range(length)] for i, length in enumerate((1, 2, 9, 9, 31, 33, 50))]
POOL += [[*POOL[6][:40], 11, 12], POOL[5][:20]]  # these share a prefix with another


@dataclass(frozen=True)
class Event:
    kind: str  # send, abort, cancel, pause, steps
    prompt: int = 0
    new: int = 1
    seed: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    affinity: str = ""
    which: int = 0
    mode: str = "retract"


SENDS = st.builds(
    Event,
    kind=st.just("send"),
    prompt=st.integers(0, len(POOL) - 1),
    new=st.integers(1, 20),
    seed=st.integers(0, 3),
    temperature=st.sampled_from([1.0, 0.7, 0.0]),
    top_p=st.sampled_from([1.0, 0.9]),
    affinity=st.sampled_from(["", "a", "b"]),
)
OTHERS = st.builds(
    Event,
    kind=st.sampled_from(["abort", "cancel", "pause", "steps", "steps"]),
    which=st.integers(0, 30),
    mode=st.sampled_from(["retract", "in_place"]),
)
EVENTS = st.lists(st.one_of(SENDS, SENDS, OTHERS), min_size=1, max_size=24)


class Bench:
    """One engine with few slots and small prefills, and what each request gives alone."""

    def __init__(self, checkpoint: str) -> None:
        args = RunConfig(hf_checkpoint=checkpoint, device="cpu", engine_max_context=CONTEXT, engine_max_running=4, engine_prefill_tokens=24)
        self.engine = EmbeddedEngine(args, "mixed")
        self.loop = asyncio.new_event_loop()
        self.loop.run_until_complete(self.engine.init())
        self.known: dict[tuple, Completion] = {}

    async def alone(self, request: GenerateRequest) -> Completion:
        key = (tuple(request.input_ids), dataclasses.astuple(request.sampling))
        if key not in self.known:
            self.known[key] = await self.engine.generate(request)
        return self.known[key]


@pytest.fixture(scope="module")
def bench(checkpoint: str) -> Iterator[Bench]:
    made = Bench(checkpoint)
    yield made
    made.loop.run_until_complete(made.engine.dispose())
    made.loop.close()


async def play(engine: EmbeddedEngine, events: list[Event]) -> dict[str, tuple[GenerateRequest, asyncio.Task]]:
    sent: dict[str, tuple[GenerateRequest, asyncio.Task]] = {}
    for event in events:
        names = list(sent)
        name = names[event.which % len(names)] if names else "nobody"
        if event.kind == "send":
            params = SamplingParams(event.new, event.temperature, event.top_p, seed=event.seed, ignore_eos=event.seed % 2 == 0)
            request = GenerateRequest(f"r{len(sent)}", list(POOL[event.prompt]), params, event.affinity)
            sent[request.request_id] = (request, asyncio.create_task(engine.generate(request)))
            await asyncio.sleep(0)
        elif event.kind == "abort":
            await engine.abort([name])
        elif event.kind == "cancel" and names:
            sent[name][1].cancel()
        elif event.kind == "pause":
            await engine.pause(event.mode)
            await engine.resume()
        else:
            for _ in range(event.which % 7):
                await engine.abort(["nobody"])  # back from the thread: it made a step between
    await asyncio.gather(*(task for _, task in sent.values()), return_exceptions=True)
    await engine.abort(["nobody"])  # behind whatever the cancelled ones have queued
    return sent


@torch.no_grad()
def is_near_tie(model: PreTrainedModel, request: GenerateRequest, before: list[int]) -> bool:
    """Whether rounding may decide which token follows `before`."""
    params = request.sampling
    logits = model(torch.tensor([request.input_ids + before])).logits[0, -1].double()
    if params.temperature == 0:
        best = logits.topk(2).values
        return bool(best[0] - best[1] < 1e-4)
    p = (logits / params.temperature).softmax(-1)
    if params.top_p < 1:
        p = p.sort(descending=True).values
        edge = (p.cumsum(0) - params.top_p).abs().min()
        if edge < 1e-5:
            return True
        p = p[p.cumsum(0) - p < params.top_p]
        p = p / p.sum()
    return bool((p.cumsum(0) - uniforms([params.seed], [len(before)])[0]).abs().min() < 1e-5)


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(EVENTS)
def test_a_request_does_not_feel_its_neighbours(bench: Bench, reference: PreTrainedModel, events: list[Event]) -> None:
    sent = bench.loop.run_until_complete(play(bench.engine, events))
    for request, task in sent.values():
        if task.cancelled():
            continue
        mixed, alone = task.result(), bench.loop.run_until_complete(bench.alone(request))
        count = len(mixed.token_ids)
        if mixed.finish_reason is not FinishReason.ABORT:
            assert (mixed.finish_reason, count) == (alone.finish_reason, len(alone.token_ids)) or mixed.token_ids != alone.token_ids
        same = next((i for i in range(count) if mixed.token_ids[i] != alone.token_ids[i]), count)
        assert same == count or is_near_tie(reference, request, alone.token_ids[:same])
        assert np.abs(np.array(mixed.logprobs[:same]) - alone.logprobs[:same]).max(initial=0) < 1e-4
        assert mixed.version_spans == ([(0, count, 0)] if count else [])
    health = bench.loop.run_until_complete(bench.engine.health())
    assert (health.healthy, health.running, health.waiting) == (True, 0, 0)
    scheduler = bench.engine._core.ready.scheduler
    assert scheduler.running == []
    assert scheduler.num_waiting == 0
