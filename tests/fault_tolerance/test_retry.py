"""C85: one 502 is nothing; the end of trying is."""

import asyncio

import pytest

from miles.fault_tolerance.retry import backoff, retry


class Clock:
    def __init__(self) -> None:
        self.slept: list[float] = []

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


def failing(times: int, error: Exception):
    async def action() -> int:
        action.calls += 1
        if action.calls <= times:
            raise error
        return action.calls

    action.calls = 0
    return action


def test_backoff_doubles_up_to_its_limit():
    assert [backoff(n) for n in range(8)] == [5, 10, 20, 40, 80, 160, 300, 300]
    assert backoff(10**6) == 300


@pytest.mark.case("C85")
async def test_one_bad_gateway_is_retried():
    clock = Clock()
    action = failing(1, ConnectionError("502"))
    assert await retry(action, what="pause", retries=2, retry_on=(ConnectionError,), sleep=clock.sleep) == 2
    assert clock.slept == [0.2]


@pytest.mark.case("C85")
async def test_trying_ends_and_says_how_often():
    clock = Clock()
    action = failing(99, ConnectionError("502"))
    with pytest.raises(ConnectionError) as caught:
        await retry(action, what="pause engine-0", retries=2, retry_on=(ConnectionError,), sleep=clock.sleep)
    assert action.calls == 3
    assert caught.value.__notes__ == ["pause engine-0: tried 3 times"]


async def test_other_errors_pass_at_once():
    action = failing(1, ValueError("bad request"))
    with pytest.raises(ValueError):
        await retry(action, what="x", retries=5, retry_on=(ConnectionError,))
    assert action.calls == 1


async def test_each_try_has_its_time():
    async def action() -> None:
        await asyncio.Event().wait()

    with pytest.raises(TimeoutError):
        await retry(action, what="x", retries=1, retry_on=(TimeoutError,), timeout=0.01, sleep=Clock().sleep)
