"""Waves: the same bits whatever the order of arrival; and who waits for whom."""

import asyncio
import random
from collections.abc import Callable
from dataclasses import replace

import pytest

from miles.engines.embedded.engine import EmbeddedEngine
from miles.types import Completion, FinishReason, GenerateRequest, SamplingParams, Wave

Start = Callable[..., EmbeddedEngine]


def ask(request_id: str, prompt: list[int], new: int = 12, wave: Wave | None = None, **sampling: object) -> GenerateRequest:
    params = SamplingParams(**({"max_new_tokens": new, "seed": 1, "ignore_eos": True} | sampling))
    return GenerateRequest(request_id, prompt, params, affinity=request_id[0], wave=wave)


def wave_of(name: str, groups: int = 4, siblings: int = 4) -> list[GenerateRequest]:
    draw = random.Random(name)
    requests = []
    for group in range(groups):
        prompt = [draw.randrange(2, 512) for _ in range(draw.randrange(1, 40))]
        for sibling in range(siblings):
            order = len(requests)
            requests.append(
                ask(
                    f"{group}-{sibling}-{name}",
                    prompt,
                    new=draw.randrange(1, 24),
                    seed=order,
                    temperature=draw.choice([1.0, 0.8]),
                    wave=Wave(name, groups * siblings, order),
                )
            )
    return requests


async def send(engine: EmbeddedEngine, requests: list[GenerateRequest], yields: random.Random | None = None) -> list[Completion]:
    """Send in the order given, with a random number of turns of the loop (and steps of the engine) between."""
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(engine.generate(request)))
        if yields is not None:
            for _ in range(yields.randrange(3)):
                await engine.abort(["unknown"])
    return await asyncio.gather(*tasks)


async def test_a_wave_gives_the_same_bits_in_any_order_of_arrival(start: Start) -> None:
    first, second = await start(engine_max_running=5), await start("engine-1", engine_max_running=5)
    requests = wave_of("w")
    expected = {answer.request_id: answer for answer in await send(first, requests)}
    for trial in range(4):
        engine, draw = (first, second)[trial % 2], random.Random(trial)
        shuffled = draw.sample(requests, len(requests))
        noise = [ask(f"noise-{trial}-{i}", [7, 8, 9 + i], new=draw.randrange(1, 30), seed=i) for i in range(trial)]
        answers = (await asyncio.gather(send(engine, noise), send(engine, shuffled, draw)))[1]
        assert {answer.request_id: answer for answer in answers} == expected


async def test_two_waves_that_arrive_mixed_run_one_after_another(start: Start) -> None:
    engine = await start(engine_max_running=5)
    apart = [await send(engine, wave_of(name)) for name in ("a", "b")]
    expected = {answer.request_id: answer for answers in apart for answer in answers}
    mixed = random.Random(3).sample(wave_of("a") + wave_of("b"), 32)
    assert {answer.request_id: answer for answer in await send(engine, mixed, random.Random(4))} == expected


async def test_a_wave_waits_until_it_is_complete_and_loose_requests_do_not_wait_for_it(start: Start) -> None:
    engine = await start()
    *early, last = wave_of("w")
    tasks = [asyncio.create_task(engine.generate(request)) for request in early]
    assert len((await engine.generate(ask("loose", [5, 6]))).token_ids) == 12
    assert not any(task.done() for task in tasks)
    health = await engine.health()
    assert (health.running, health.waiting) == (0, len(early))
    while (await engine.health()).stuck_seconds:
        await engine.abort(["unknown"])  # comes back from the thread that made the last step
    await engine.generate(last)
    await asyncio.gather(*tasks)


async def test_loose_requests_and_waves_take_turns(start: Start) -> None:
    engine = await start(engine_max_running=2)
    order: list[str] = []

    async def note(request: GenerateRequest) -> None:
        await engine.generate(request)
        order.append(request.wave.wave_id if request.wave else "loose")

    await engine.pause("retract")
    loose = [ask(f"loose-{i}", [5, 6, i], new=3) for i in range(2)]
    tasks = [asyncio.create_task(note(request)) for request in [*wave_of("a", 1, 3), *loose, *wave_of("b", 1, 3)]]
    await engine.abort(["unknown"])
    await engine.resume()
    await asyncio.gather(*tasks)
    assert order == ["a"] * 3 + ["loose"] * 2 + ["b"] * 3


async def test_a_refused_or_aborted_member_does_not_hold_up_its_wave(start: Start) -> None:
    engine = await start()
    requests = wave_of("w")
    requests[3] = replace(requests[3], input_ids=[100_000])
    tasks = [asyncio.create_task(engine.generate(request)) for request in requests[:10]]
    while (await engine.health()).waiting < 9:
        await engine.abort(["unknown"])
    tasks[1].cancel()
    assert await engine.abort([requests[2].request_id]) == 1
    results = await asyncio.gather(*tasks, *map(engine.generate, requests[10:]), return_exceptions=True)
    kinds = [type(result) for result in results]
    assert kinds[1] is asyncio.CancelledError
    assert kinds[3] is ValueError
    assert kinds.count(Completion) == 14
    assert results[2].finish_reason is FinishReason.ABORT
    assert (await engine.health()).waiting == 0


async def test_a_wave_that_contradicts_itself_is_refused(start: Start) -> None:
    engine = await start()
    good = wave_of("w", 1, 2)
    first = asyncio.create_task(engine.generate(good[0]))
    await asyncio.sleep(0)
    for wave in (Wave("w", 3, 1), Wave("w", 2, 0), Wave("w", 2, 2), Wave("x", 1, -1)):
        with pytest.raises(ValueError, match=r"request bad: .*does not fit its wave"):
            await engine.generate(ask("bad", [5], wave=wave))
    await engine.generate(good[1])
    await first


async def test_abort_of_all_forgets_waves_that_will_never_be_complete(start: Start) -> None:
    engine = await start()
    tasks = [asyncio.create_task(engine.generate(request)) for request in wave_of("w")[:5]]
    await asyncio.sleep(0)
    assert await engine.abort() == 5
    await asyncio.gather(*tasks)
    assert engine._core.ready.scheduler.waves == {}
    assert all(answer.finish_reason is FinishReason.LENGTH for answer in await send(engine, wave_of("w")))
