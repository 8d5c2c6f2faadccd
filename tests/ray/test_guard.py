"""What ends a run from outside: failures of a watch, signals, and how the end is told."""

import asyncio
import os
import signal
import sys

import pytest

from miles.ray.guard import EndOfRun, Interrupted, RunGuard, tell


async def test_whoever_waits_raises_the_first_failure():
    guard = RunGuard()
    waiting = [asyncio.ensure_future(guard.watch(asyncio.sleep(60))) for _ in range(3)]
    await asyncio.sleep(0)
    guard.fail(ValueError("first"))
    guard.fail(ValueError("second"))
    for error in await asyncio.gather(*waiting, return_exceptions=True):
        assert str(error) == "first"
    with pytest.raises(ValueError, match="first"):
        await guard.watch(asyncio.sleep(60))


async def test_results_and_errors_pass_through():
    guard = RunGuard()
    assert await guard.watch(asyncio.sleep(0, "done")) == "done"

    async def fails():
        raise KeyError("own")

    with pytest.raises(KeyError, match="own"):
        await guard.watch(fails())


async def test_a_signal_saves_then_ends():
    guard = RunGuard()
    saved = []

    async def save():
        saved.append(1)
        return "; saved"

    hook = sys.excepthook
    guard.install(save)
    try:
        await guard.halt_if_asked()
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(Interrupted, match="ended by SIGTERM; saved") as caught:
            await guard.watch(asyncio.sleep(60))
        assert caught.value.exit_code == 143
        assert saved == [1]
        with pytest.raises(Interrupted):
            await guard.halt_if_asked()
    finally:
        guard.restore()
        sys.excepthook = hook


async def test_the_handlers_from_before_the_run_come_back():
    guard, hook, old = RunGuard(), sys.excepthook, signal.getsignal(signal.SIGTERM)

    def own(signum, frame):
        raise AssertionError("not sent here")

    signal.signal(signal.SIGTERM, own)
    try:
        guard.install(asyncio.Event().wait)
        guard.restore()
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, old)
        sys.excepthook = hook


async def test_a_second_signal_does_not_wait_for_the_save():
    guard = RunGuard()
    hook = sys.excepthook
    guard.install(asyncio.Event().wait)
    try:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted, match="ended by SIGINT"):
            await guard.watch(asyncio.sleep(60))
    finally:
        guard.restore()
        sys.excepthook = hook


def test_an_end_that_is_no_fault_is_one_line_and_has_its_code(capsys):
    with pytest.raises(SystemExit) as caught:
        tell(EndOfRun, EndOfRun("nothing to do", 0), None)
    assert caught.value.code == 0
    assert capsys.readouterr().err == "miles: nothing to do\n"


def test_a_fault_ends_with_the_workers_own_traceback(capsys):
    error = ValueError("mine")
    error.__notes__ = ["\nIn worker executor:\n\nTraceback ...\nValueError: mine"]
    tell(ValueError, error, None)
    assert capsys.readouterr().err.rstrip().endswith("ValueError: mine")
