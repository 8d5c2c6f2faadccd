"""Workers say what they do and wait for, while they live and after."""

import asyncio
import time

import pytest

from miles.ray.heartbeat import Heartbeat
from miles.ray.who_waits import beats_here, report
from miles.ray.worker_manager import WorkerManager
from miles.ray.worker_spec import Limit, WorkerSpec
from miles.tracking import waits

SLOW = Limit(60.0, "--sample-timeout")


class Asker:
    """Waits for the other one."""

    def __init__(self) -> None:
        self.other = None

    async def meet(self, other) -> None:
        self.other = other

    async def ask(self) -> str:
        return await self.other.answer()

    def waits_for(self) -> list[str]:
        return ["its lunch"]


class Answerer:
    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def answer(self) -> str:
        await self.go.wait()
        return "yes"

    async def release(self) -> None:
        self.go.set()


def spec(name, cls):
    return WorkerSpec(name=name, cls=f"{__name__}.{cls}", kwargs={}, kind="engine", start=SLOW, default_limit=SLOW)


async def until(condition, limit=20.0):
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.01)


@pytest.fixture
async def pair(tmp_path):
    manager = WorkerManager(str(tmp_path / "logs"))
    asker, answerer = await manager.start_all([spec("asker", "Asker"), spec("answerer", "Answerer")])
    await asker.meet(answerer)
    asking = asyncio.ensure_future(asker.ask())
    await until(lambda: any(beat.waits for beat in beats_here(manager, False) if beat.name == "asker"))
    yield manager, tmp_path / "logs"
    await answerer.release()
    assert await asking == "yes"
    assert not any(beat.waits for beat in beats_here(manager, False))
    await manager.shutdown()


async def test_the_chain_with_the_stacks_of_its_end(pair):
    manager, logs = pair
    said = await report(manager, logs)
    assert "driver waits for asker (ask, 0 s), which waits for answerer (answer, 0 s)" in said
    assert "asker waits for its lunch" in said
    assert "worker answerer: answer for" in said
    assert "await self.go.wait()" in said
    assert "worker asker" not in said, "its stack is of no interest"


async def test_a_process_writes_down_what_it_does_and_its_stacks_when_asked(pair):
    manager, logs = pair
    heart = Heartbeat(logs, lambda with_stacks: beats_here(manager, with_stacks), "test")
    heart.start()
    try:
        await until(lambda: set(waits.read(logs)) == {"driver", "asker", "answerer"})
        beats = waits.read(logs)
        assert [(call.worker, call.method) for call in beats["driver"].waits] == [("asker", "ask")]
        assert [(call.worker, call.method) for call in beats["asker"].waits] == [("answerer", "answer")]
        assert [call.method for call in beats["answerer"].calls] == ["answer"]
        assert waits.chain(beats, time.time()).ends == ["answerer"]
        found = await asyncio.to_thread(waits.ask_for_stacks, logs, ["answerer"], 20.0)
        assert "self.go.wait()" in found["answerer"]
    finally:
        heart.stop()


async def test_a_folder_that_is_gone_costs_the_signs_and_nothing_else(tmp_path, caplog):
    heart = Heartbeat(tmp_path / "nowhere", lambda with_stacks: [waits.Beat("x")], "test")
    heart.start()
    await until(lambda: "no more signs of life" in caplog.text)
    heart.stop()
