"""Workers of both kinds behind one handle: calls, errors, deaths, limits, restarts, and the end."""

import asyncio
import dataclasses
import gc
import os
import time
from pathlib import Path

import psutil
import pytest

from miles.ray.host import Host
from miles.ray.worker_handle import CallTimeout, WorkerDied, WorkerRestarted
from tests.ray.conftest import plain
from tests.ray.plain_workers import UserError


async def test_calls_reach_one_compute_thread_and_workers_reach_each_other(pair):
    pid, on_its_thread, threads = await pair.one.where()
    assert on_its_thread
    assert (pid == os.getpid()) == pair.manager.in_process
    assert pair.manager.in_process or threads == "1"
    assert await pair.two.ask(pair.one, "quick") == "quick"


async def test_async_calls_and_stacks_answer_while_it_computes(pair):
    worker = pair.one
    computing = asyncio.ensure_future(worker.busy_here_in_compute(1.2))
    await asyncio.sleep(0.2)
    since = time.monotonic()
    assert await worker.quick() == "quick"
    stacks = await worker.worker_stacks()
    assert time.monotonic() - since < 1.0
    assert "busy_here_in_compute for 0." in stacks
    assert "time.sleep(seconds)" in stacks
    assert await computing == 1.2


async def test_an_error_keeps_its_type_and_brings_its_traceback_last(pair):
    worker = pair.one
    with pytest.raises(UserError, match="out of cheese") as caught:
        await worker.fail("out of cheese")
    if not pair.manager.in_process:
        note = caught.value.__notes__[-1]
        assert note.rstrip().endswith("UserError: out of cheese")
        assert "raise UserError(text)" in note
        assert worker.worker_log in note
        assert "about to fail" in Path(worker.worker_log).read_text()


async def test_an_error_that_cannot_travel_and_an_exit_still_arrive(ray_pair):
    worker = ray_pair.one
    with pytest.raises(RuntimeError, match="Untravelling: 1/2"):
        await worker.fail_badly()
    with pytest.raises(RuntimeError, match="SystemExit: enough"):
        await worker.leave()
    with pytest.raises(AttributeError, match="no method 'missing'"):
        await worker.missing()


async def test_a_constructor_that_raises_leaves_nothing(manager):
    with pytest.raises(UserError, match="no such greeting"):
        await manager.start(plain("one", greeting="raise"))
    if manager.in_process:
        with pytest.raises(ValueError, match="no module"):
            await manager.start(dataclasses.replace(plain("one"), cls="tests.ray.nowhere.Plain"))
    worker = await manager.start(plain("one"))
    assert await worker.quick() == "quick"


async def test_a_start_that_is_given_up_says_nothing_afterwards(process_manager, monkeypatch):
    """When one worker cannot be built, the others are ended while they are being built."""
    asked, killed, reports = asyncio.Event(), asyncio.Event(), []

    async def construct(self, cls, kwargs):
        asked.set()
        await killed.wait()
        raise WorkerDied("one", "one.log", "it was ended by the run")

    monkeypatch.setattr(Host, "construct", construct)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: reports.append(context["message"]))
    starting = asyncio.ensure_future(process_manager.start(plain("one")))
    await asked.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    killed.set()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()
    assert reports == []


async def test_a_dead_worker_names_its_log_and_its_last_words(ray_manager):
    worker = await ray_manager.start(plain("mortal"))
    waiting = asyncio.ensure_future(worker.wait(0.4))
    with pytest.raises(WorkerDied, match="last words") as caught:
        await worker.die()
    assert caught.value.name == "mortal"
    assert worker.worker_log in str(caught.value)
    with pytest.raises(WorkerDied):
        await waiting
    with pytest.raises(WorkerDied):
        await worker.quick()


async def test_handles_stay_good_after_a_restart(manager):
    worker, other = await manager.start_all([plain("one"), plain("two")])
    assert await other.ask(worker, "quick") == "quick"
    await manager.end("one")
    with pytest.raises(WorkerDied):
        await other.ask(worker, "quick")
    await manager.restart("one")
    assert await worker.quick() == "quick"
    await other.keep(worker)
    assert await other.ask_kept("quick") == "quick"
    await manager.restart("one")
    if not manager.in_process:  # the other knew the old process only
        with pytest.raises(WorkerRestarted, match="started again meanwhile"):
            await other.ask_kept("quick")
    assert await other.ask_kept("quick") == "quick"


async def test_a_call_past_its_limit_says_who_waits_for_what(pair):
    worker = pair.two
    with pytest.raises(CallTimeout, match=r"the driver waited 0\.5 s \(--sample-timeout\) for wait of worker two") as caught:
        await worker.wait(100)
    assert "asyncio.sleep(seconds)" in str(caught.value)
    assert await worker.quick() == "quick"


async def test_a_cancelled_call_is_cancelled_in_the_worker(pair):
    worker = pair.one
    call = asyncio.ensure_future(worker.wait(100))
    await asyncio.sleep(0.2)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    for _ in range(50):
        if "no call running" in await worker.worker_stacks():
            break
        await asyncio.sleep(0.05)
    assert "no call running" in await worker.worker_stacks()


async def test_arrays_travel_through_the_store_read_only_and_are_freed(pair):
    manager = pair.manager
    ref = await pair.one.put(1000)
    manager.store.adopt([ref])
    assert manager.store.count() == 1
    total, writeable = await pair.two.total(ref)
    assert total == 499500.0
    assert not writeable
    manager.store.free([ref])
    manager.store.free([ref])
    assert manager.store.count() == 0
    with pytest.raises(KeyError, match="freed"):
        manager.store.get(ref)


@pytest.mark.case("C83")
async def test_shutdown_disposes_and_leaves_no_process(ray_manager):
    worker = await ray_manager.start(plain("one"))
    collecting, frozen = await worker.collections()
    assert collecting
    assert frozen > 10_000, "what was imported is not looked through"
    pid, _, _ = await worker.where()
    child = await worker.spawn()
    stuck = asyncio.ensure_future(worker.busy_here_in_compute(60))
    await asyncio.sleep(0.2)
    log = worker.worker_log
    await ray_manager.shutdown()
    await ray_manager.shutdown()
    with pytest.raises(WorkerDied):
        await stuck
    assert "disposed" in Path(log).read_text()
    for _ in range(100):
        if not psutil.pid_exists(pid) and not psutil.pid_exists(child):
            break
        await asyncio.sleep(0.05)
    assert not psutil.pid_exists(pid)
    assert not psutil.pid_exists(child)
