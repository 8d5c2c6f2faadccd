"""Threads for sync rewards: short calls follow one another on one, long ones hold nobody up."""

import asyncio
import sys
import threading

import pytest
import uvloop

from miles.rewards import daemon_thread
from miles.rewards.daemon_thread import MOST_AT_ONCE, CallLate, DaemonThreads


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy])
def event_loop_policy(request):
    """Ray's actors take uvloop where it is installed."""
    return request.param()


@pytest.fixture
async def threads():
    made = DaemonThreads()
    yield made
    made.close()


async def test_short_calls_share_a_thread(threads, monkeypatch):
    monkeypatch.setattr(daemon_thread, "SPACING", 0.0)
    monkeypatch.setattr(daemon_thread, "PATIENCE", 30.0)  # a busy machine holds a thread up, too
    names = await asyncio.gather(*(threads.run(threading.get_ident, limit=60) for _ in range(200)))
    assert len(set(names)) == 1


async def test_a_look_that_is_due_at_once(threads, monkeypatch):
    monkeypatch.setattr(daemon_thread, "SPACING", 0.0)
    monkeypatch.setattr(daemon_thread, "PATIENCE", 0.0)
    assert await asyncio.gather(*(threads.run(int, number, limit=60) for number in range(200))) == list(range(200))


async def test_long_calls_run_side_by_side(threads):
    barrier = threading.Barrier(MOST_AT_ONCE)  # passes when all are inside at once
    places = await asyncio.gather(*(threads.run(barrier.wait, limit=60) for _ in range(MOST_AT_ONCE)))
    assert sorted(places) == list(range(MOST_AT_ONCE))


@pytest.mark.parametrize("again", range(5))
async def test_a_call_past_its_limit_is_left_behind_and_gives_its_place(threads, again):
    end = threading.Event()
    late = [threads.run(end.wait, limit=0.05) for _ in range(MOST_AT_ONCE)]
    outcomes = await asyncio.gather(*late, threads.run(int, "3", limit=60), return_exceptions=True)
    assert [type(outcome) for outcome in outcomes[:-1]] == [CallLate] * MOST_AT_ONCE
    assert outcomes[-1] == 3
    end.set()
    assert await threads.run(int, "4", limit=60) == 4


async def test_a_cancelled_call_gives_its_place(threads):
    begun, end = [threading.Event() for _ in range(MOST_AT_ONCE)], threading.Event()
    tasks = [asyncio.ensure_future(threads.run(lambda mine=mine: mine.set() or end.wait(), limit=60)) for mine in begun]
    for mine in begun:
        assert await asyncio.to_thread(mine.wait, 60)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert await threads.run(int, "5", limit=60) == 5
    end.set()


async def test_errors_arrive_and_an_exit_ends_nothing(threads):
    with pytest.raises(ZeroDivisionError):
        await threads.run(lambda: 1 // 0, limit=60)
    with pytest.raises(RuntimeError, match="called for an exit: SystemExit: 3"):
        await threads.run(lambda: sys.exit(3), limit=60)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await threads.run(lambda: next(iter([])), limit=60)
