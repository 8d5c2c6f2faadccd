"""What a start waits for is said while it is waited for."""

import asyncio
import re
import time
from pathlib import Path

from miles.ray.starting import Starting, waited_for
from tests.ray.conftest import plain


async def test_who_is_waited_for_is_said_with_limit_and_log_until_all_are_up(process_manager, monkeypatch, caplog):
    monkeypatch.setattr("miles.ray.starting.WORTH_SAYING", 0.0)
    caplog.set_level("INFO", logger="miles")
    said: asyncio.Queue[str] = asyncio.Queue()
    worker = await process_manager.start(plain("one"))
    starting = Starting(process_manager, time.monotonic())
    waiting = asyncio.ensure_future(worker.busy_here_in_compute(0.3))
    starting.begin(said.put_nowait, first=0.0, every=0.01)
    first = await said.get()
    await waiting
    starting.up()
    log = re.escape(worker.worker_log.rsplit("/", 2)[1]) + r"/one\.log"
    limit = r"\(0 s so far; limit 30 s by --train-timeout\)"
    assert re.fullmatch(rf"waiting for one to answer to busy_here_in_compute {limit}: \S*{log}", first)
    assert re.search(r"all workers are up after \d\.\d s: one", caplog.text)
    assert waited_for(process_manager, time.time()) == ""


async def test_the_log_of_a_server_that_a_worker_started_is_named(process_manager, monkeypatch):
    worker = await process_manager.start(plain("one"))
    waiting = asyncio.ensure_future(worker.wait(0.2))
    await asyncio.sleep(0)
    log = Path(process_manager.log_path(process_manager.spec("one")))
    log.with_name("one-sglang.log").touch()
    text = waited_for(process_manager, time.time() + 12)
    assert re.search(r"\(12 s so far; limit 0\.5 s by --sample-timeout\): \S*/one-sglang\.log$", text)
    assert waited_for(process_manager, time.time()) == ""
    await waiting
