"""The router over real engines' protocol: a stand-in of a few lines answers when it is told to."""

import asyncio

import pytest

from miles.engines.router import EngineLost, NoEngineError, Router
from miles.protocols import ProcessGone, ProcessReplaced
from miles.types import Completion, FinishReason, GenerateRequest, SamplingParams, Wave


class Scripted:
    """Answers each request when told, or fails."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Future[Completion]] = {}
        self.seen: list[str] = []
        self.error: Exception | None = None
        self.aborts: list[list[str]] = []

    async def generate(self, request: GenerateRequest) -> Completion:
        self.seen.append(request.request_id)
        if self.error is not None:
            raise self.error
        self.open[request.request_id] = asyncio.get_running_loop().create_future()
        try:
            return await self.open[request.request_id]
        finally:
            del self.open[request.request_id]

    def answer(self, request_id: str, reason: FinishReason = FinishReason.LENGTH) -> None:
        self.open[request_id].set_result(Completion(request_id, [1], [0.0], reason, [(0, 1, 0)]))

    async def abort(self, request_ids: list[str] | None = None) -> int:
        assert request_ids is not None
        self.aborts.append(request_ids)
        if self.error is not None:
            raise self.error
        for request_id in request_ids:
            self.answer(request_id, FinishReason.ABORT)
        return len(request_ids)


def ask(request_id: str, affinity: str = "", wave: Wave | None = None) -> GenerateRequest:
    return GenerateRequest(request_id, [1], SamplingParams(1), affinity, wave)


async def settled() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
def engines() -> list[Scripted]:
    return [Scripted(), Scripted(), Scripted()]


async def send(router: Router, *requests: GenerateRequest, engine_index: int | None = None) -> list[asyncio.Task[Completion]]:
    tasks = []
    for request in requests:
        tasks.append(asyncio.create_task(router.generate(request, engine_index)))
        await settled()
    return tasks


async def test_new_affinities_go_to_the_least_busy_and_stay(engines: list[Scripted]) -> None:
    router = Router(engines)
    tasks = await send(router, *(ask(f"{group}{i}", affinity=group) for group in "abcd" for i in range(2)))
    assert [engine.seen for engine in engines] == [["a0", "a1", "d0", "d1"], ["b0", "b1"], ["c0", "c1"]]
    assert router.in_flight() == {f"{group}{i}": index for index, groups in enumerate(("ad", "b", "c")) for group in groups for i in (0, 1)}
    for name in ("b0", "b1"):
        engines[1].answer(name)
    await settled()
    tasks += await send(router, ask("e0", "e"), ask("b2", "b"), ask("lone"))
    assert engines[1].seen[2:] == ["e0", "b2", "lone"]  # as busy as engine 2, and before it
    assert await router.abort() == 9
    await asyncio.gather(*tasks)
    assert router.in_flight() == {}


async def test_back_pressure_keeps_the_rest_waiting_in_order(engines: list[Scripted]) -> None:
    router = Router(engines[:1], max_running=2)
    tasks = await send(router, *(ask(f"r{i}") for i in range(5)))
    assert engines[0].seen == ["r0", "r1"]
    tasks[2].cancel()
    await settled()
    engines[0].answer("r1")
    await settled()
    assert engines[0].seen == ["r0", "r1", "r3"]
    assert await router.abort(["r4", "r0", "unknown"]) == 2
    await settled()
    assert tasks[4].result() == Completion("r4", [], [], FinishReason.ABORT, [])
    assert tasks[0].result().finish_reason is FinishReason.ABORT
    engines[0].answer("r3")
    await settled()
    tasks += await send(router, ask("late"))
    assert engines[0].seen[-1] == "late"
    engines[0].answer("late")
    assert (await tasks[-1]).finish_reason is FinishReason.LENGTH


async def test_a_cancelled_request_that_was_just_let_in_gives_its_room_back(engines: list[Scripted]) -> None:
    router = Router(engines[:1], max_running=1)
    tasks = await send(router, *(ask(f"r{i}") for i in range(3)))
    engines[0].answer("r0")
    while not tasks[0].done():  # noqa: ASYNC110 - to the turn of the loop in which r1 was let in
        await asyncio.sleep(0)
    tasks[1].cancel()
    await settled()
    assert engines[0].seen[-1] == "r2"
    engines[0].answer("r2")
    assert (await tasks[2]).token_ids == [1]


@pytest.mark.case("C57")
async def test_a_bad_request_is_not_tried_again(engines: list[Scripted]) -> None:
    engines[0].error = ValueError("request r: its input is empty")
    with pytest.raises(ValueError, match="input is empty"):
        await Router(engines).generate(ask("r"))
    assert [len(engine.seen) for engine in engines] == [1, 0, 0]


async def test_a_dead_engine_is_left_for_another_with_its_siblings(engines: list[Scripted]) -> None:
    router = Router(engines)
    engines[0].error = RuntimeError("worker died")
    tasks = await send(router, ask("a0", "a"), ask("a1", "a"))
    assert [engine.seen for engine in engines] == [["a0"], ["a0", "a1"], []]
    await router.abort()
    await asyncio.gather(*tasks)


async def test_an_engine_that_failed_is_passed_over_for_a_while(engines: list[Scripted]) -> None:
    router = Router(engines[:2])
    engines[0].error = RuntimeError("worker died")
    tasks = await send(router, *(ask(f"r{i}") for i in range(6)))
    assert [len(engine.seen) for engine in engines] == [1, 6, 0]
    await router.abort()
    await asyncio.gather(*tasks)
    router.mark(1, live=False)
    engines[0].error = None
    tasks = await send(router, ask("only one left"))
    assert engines[0].seen[-1] == "only one left"
    await router.abort()
    await asyncio.gather(*tasks)


async def test_requests_that_fail_together_are_one_failure(engines: list[Scripted]) -> None:
    """An engine that comes to itself is not passed over for long because many requests were under way in it."""
    router = Router(engines[:2])
    tasks = await send(router, *(ask(f"r{i}", f"g{i}") for i in range(8)))
    for future in list(engines[0].open.values()):
        future.set_exception(OSError("connection lost"))
    await settled()
    assert len(engines[1].seen) == 8
    async with asyncio.timeout(5):  # passed over for two seconds after one failure, for sixteen after four
        while "0" not in {request_id[0] for request_id in engines[0].seen}:
            tasks += await send(router, ask(f"0{len(tasks)}", str(len(tasks))))
            await asyncio.sleep(0.05)
    await router.abort()
    await asyncio.gather(*tasks)


async def test_a_process_that_took_anothers_place_is_asked_again_and_not_passed_over(engines: list[Scripted]) -> None:
    router = Router(engines[:2])
    tasks = await send(router, ask("a0", "a"))
    engines[0].open["a0"].set_exception(ProcessReplaced("it was started again meanwhile"))
    await settled()
    tasks += await send(router, ask("b0", "b"), ask("c0", "c"))
    assert [engine.seen for engine in engines[:2]] == [["a0", "a0", "c0"], ["b0"]]
    await router.abort()
    await asyncio.gather(*tasks)


async def test_what_a_lost_engine_has_goes_to_others(engines: list[Scripted]) -> None:
    """An engine that hangs never answers: its requests, and those that wait for room in it, are not left to it."""
    router = Router(engines[:2], max_running=2)
    tasks = await send(router, *(ask(f"r{i}", "a") for i in range(3)))
    assert [engine.seen for engine in engines[:2]] == [["r0", "r1"], []]
    router.mark(0, live=False)
    await settled()
    assert len(engines[1].seen) == 2, "no more than there is room for"
    first = engines[1].seen[0]
    engines[1].answer(first)
    await settled()
    assert sorted(engines[1].seen) == ["r0", "r1", "r2"]
    own, other = (int(name[1:]) for name in engines[1].seen[1:])
    tasks[own].cancel()
    await asyncio.gather(tasks[own], return_exceptions=True)
    assert tasks[own].cancelled(), "its own end is not the engine's"
    engines[1].answer(f"r{other}")
    assert (await tasks[other]).token_ids == [1]
    assert router.in_flight() == {}


async def test_an_engine_that_is_back_gets_requests_at_once_however_many_it_lost(engines: list[Scripted]) -> None:
    router = Router(engines[:2])
    tasks = await send(router, *(ask(f"r{i}", f"g{i}") for i in range(12)))
    router.mark(0, live=False)
    await settled()
    router.mark(0, live=True)
    tasks += await send(router, ask("new", "new"))
    assert engines[0].seen[6:] == ["new"]
    for engine in engines[:2]:
        for request_id in list(engine.open):
            engine.answer(request_id)
    await asyncio.gather(*tasks)


async def test_a_request_of_the_only_engine_fails_when_it_is_lost(engines: list[Scripted]) -> None:
    router = Router(engines[:1])
    (task,) = await send(router, ask("r"))
    router.mark(0, live=False)
    with pytest.raises(EngineLost, match="engine 0 was lost while it had request r"):
        await task
    router.mark(0, live=True)
    (task,) = await send(router, ask("r again"))
    engines[0].answer("r again")
    assert (await task).token_ids == [1]


async def test_retries_are_bounded(engines: list[Scripted]) -> None:
    for engine in engines:
        engine.error = ConnectionError("gone")
    with pytest.raises(ConnectionError):
        await Router(engines, retries=1).generate(ask("r", "a"))
    assert [len(engine.seen) for engine in engines] == [1, 1, 0]
    with pytest.raises(ConnectionError):
        await Router(engines, retries=9).generate(ask("r", "a"))


async def test_engines_that_are_not_live_get_nothing(engines: list[Scripted]) -> None:
    router = Router(engines)
    tasks = await send(router, ask("a0", "a"))
    router.mark(0, live=False)
    assert [router.engine_for(position) for position in range(4)] == [1, 2, 1, 2]
    await settled()
    tasks += await send(router, ask("a1", "a"), ask("b0", "b"))
    assert [engine.seen for engine in engines] == [["a0"], ["a0", "a1"], ["b0"]]
    router.mark(0, live=True)
    assert router.live == [0, 1, 2]
    for index in range(3):
        router.mark(index, live=False)
    for attempt in (router.generate(ask("x")), router.generate(ask("y", "a"))):
        with pytest.raises(NoEngineError):
            await attempt
    with pytest.raises(NoEngineError):
        router.engine_for(0)
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(end) for end in ends} == {EngineLost}
    assert router.in_flight() == {}


async def test_without_a_live_engine_requests_wait_for_one(engines: list[Scripted]) -> None:
    router = Router(engines[:1], patience=5.0)
    engines[0].error = ProcessGone("killed")
    with pytest.raises(ProcessGone):
        await router.generate(ask("a"))
    assert router.live == [], "nobody had to notice it first"
    engines[0].error = None
    tasks = await send(router, ask("b"), ask("c"))
    waiting = asyncio.create_task(router.ready())
    await settled()
    assert engines[0].seen == ["a"]
    router.mark(0, live=True)
    await waiting
    await settled()
    assert engines[0].seen == ["a", "b", "c"]
    assert await router.abort() == 2
    await asyncio.gather(*tasks)


async def test_the_wait_for_an_engine_ends(engines: list[Scripted]) -> None:
    router = Router(engines[:1], patience=0.05)
    router.mark(0, live=False)
    with pytest.raises(NoEngineError, match=r"none came back within 0\.05 s"):
        await router.generate(ask("a"))


async def test_a_wave_goes_where_its_sender_says_and_is_never_held_back_or_retried(engines: list[Scripted]) -> None:
    router = Router(engines, max_running=2)
    wave = [ask(f"w{i}", wave=Wave("w", 5, i)) for i in range(5)]
    tasks = await send(router, *wave, engine_index=router.engine_for(1))
    assert engines[1].seen == [f"w{i}" for i in range(5)]
    assert router.num_engines == 3
    await router.abort()
    await asyncio.gather(*tasks)
    engines[2].error = RuntimeError("worker died")
    with pytest.raises(RuntimeError):
        await router.generate(ask("v", wave=Wave("v", 1, 0)), engine_index=2)
    assert [len(engine.seen) for engine in engines] == [0, 5, 1]


async def test_an_engine_that_cannot_abort_does_not_stop_the_others(engines: list[Scripted]) -> None:
    router = Router(engines)
    tasks = await send(router, ask("a"), ask("b"))
    engines[0].error = RuntimeError("worker died")
    assert await router.abort() == 1
    engines[0].answer("a")
    await asyncio.gather(*tasks)


def test_a_router_needs_an_engine() -> None:
    with pytest.raises(ValueError, match="at least one"):
        Router([])
