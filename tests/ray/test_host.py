"""A hosted object that is called before it is there."""

import asyncio
import threading

import pytest

from miles.ray import host
from miles.ray.host import Host

may_build = threading.Event()


class Slow:
    def __init__(self, works):
        may_build.wait(10)
        if not works:
            raise OSError("disk full")

    async def answer(self):
        return 42


@pytest.fixture
def slow():
    may_build.clear()
    made = Host("slow")
    yield made
    may_build.set()
    made.close()


async def begin(slow, works):
    building = asyncio.ensure_future(slow.construct(f"{__name__}.Slow", {"works": works}))
    calling = asyncio.ensure_future(slow.call("answer", (), {}))
    await asyncio.sleep(0.05)
    assert not calling.done()
    return building, calling


async def test_a_call_waits_for_the_construction(slow):
    building, calling = await begin(slow, works=True)
    may_build.set()
    assert await calling == 42
    await building


async def test_a_call_on_what_could_not_be_constructed_says_so(slow):
    building, calling = await begin(slow, works=False)
    may_build.set()
    with pytest.raises(OSError, match="disk full"):
        await building
    with pytest.raises(RuntimeError, match="answer of worker slow: it could not be constructed"):
        await calling


async def test_the_wait_for_a_construction_ends(slow, monkeypatch):
    monkeypatch.setattr(host, "_BUILD_LIMIT", 0.1)
    _, calling = await begin(slow, works=True)
    with pytest.raises(RuntimeError, match=r"still being constructed after 0\.1 s"):
        await calling
