"""Rewards, tools and generate functions that the tests name by their dotted paths."""

from __future__ import annotations

import asyncio
import sys
from typing import Any

from miles.protocols import GenerateCall
from miles.rollout.generate import append_completion
from miles.types import PromptGroup, Sample, SampleStatus


async def by_tokens(sample: Sample) -> dict[str, float]:
    """A number that depends on the response's tokens alone."""
    return {"reward": float(sum(sample.response_ids) % 7) / 4, "parity": float(sum(sample.response_ids) % 2)}


async def by_parity(sample: Sample) -> float:
    return float(sum(sample.response_ids) % 2)


async def by_place(sample: Sample) -> float:
    """Different for siblings."""
    return float(sample.sample_index % 2)


scored: list[int] = []


async def counted(sample: Sample) -> float:
    """Notes whom it scores."""
    scored.append(sample.sample_index)
    return float(sample.sample_index % 2)


async def by_label(sample: Sample) -> float | None:
    """What the label says: a list gives each sibling its own reward."""
    said = sample.label[sample.sample_index % len(sample.label)] if isinstance(sample.label, list) else sample.label
    return None if said is None else float(said)


async def raises(sample: Sample) -> float:
    raise KeyError("no such thing in my reward")


async def stuck(sample: Sample) -> float:
    """One sample's judge never answers."""
    if sample.label == "stuck" and sample.sample_index % 4 == 1:
        await asyncio.Event().wait()
    return float(sample.sample_index % 2)


def refuse_everything(group: PromptGroup) -> str | None:
    return "never"


async def broken_generate(sample: Sample, generate: GenerateCall) -> None:
    completion = await generate(sample.prompt_ids)
    append_completion(sample, completion)
    sample.loss_mask.pop()
    sample.status = SampleStatus.COMPLETED


async def retokenised(sample: Sample, generate: GenerateCall) -> None:
    """As an environment that decodes and encodes again: the ids need not be those that were written."""
    completion = await generate(sample.prompt_ids)
    completion.token_ids[0] += 1
    append_completion(sample, completion)
    sample.status = SampleStatus.COMPLETED


async def sends_other_ids(sample: Sample, generate: GenerateCall) -> None:
    completion = await generate([sample.prompt_ids[0] + 1, *sample.prompt_ids[1:]])
    append_completion(sample, completion)
    sample.status = SampleStatus.COMPLETED


async def buggy_generate(sample: Sample, generate: GenerateCall) -> None:
    raise TypeError("a bug in my environment")


def add(a: int, b: int) -> int:
    return a + b


async def search(query: str) -> list[str]:
    return [query, "found"]


async def hangs() -> str:
    await asyncio.Event().wait()
    return ""


async def deaf(sample: Sample, generate: GenerateCall) -> None:
    """An environment that will not be cancelled: sample 0's swallows the cancellation and goes on for a while."""
    completion = await generate(sample.prompt_ids)
    if sample.sample_index == 0:
        for _ in range(100):
            try:
                await asyncio.sleep(0.05)
            except asyncio.CancelledError:
                continue
    append_completion(sample, completion)
    sample.status = SampleStatus.COMPLETED


async def slow_to_end(sample: Sample, generate: GenerateCall) -> None:
    """An environment that has something to put away when it is cancelled."""
    try:
        await generate(sample.prompt_ids)
    finally:
        for _ in range(20):
            await asyncio.sleep(0)


def fails(how: str = "") -> Any:
    match how:
        case "exit":
            sys.exit(3)
        case "stop":
            next(iter(()))
        case "half":
            return "a\ud800"
        case "endless":
            endless: list[Any] = []
            endless.append(endless)
            return endless
    raise RuntimeError("the disk is full")


async def exits() -> None:
    sys.exit(3)


TOOLS = {"add": add, "search": search, "fails": fails, "hangs": hangs, "exits": exits}


async def evaluate_snapshot(hf_dir: str, rollout_id: int) -> dict[str, float]:
    return {"length": len(hf_dir), "eval/mine/score": rollout_id}
