"""What ends a run from outside: failures of a watch, signals, and how the end is told."""

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from miles.plugins import load
from miles.ray.guard import HOUSE, WORKER_NOTE, EndOfRun, Interrupted, RunGuard, tell
from miles.rewards.reward import RewardError


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


def test_a_guard_that_outlives_its_loop_leaves_the_default_action():
    async def leave_open() -> RunGuard:
        guard = RunGuard()
        guard.install(asyncio.Event().wait)
        asyncio.get_running_loop().create_task(closing(guard))
        await asyncio.sleep(0)
        return guard

    async def closing(guard: RunGuard) -> None:
        try:
            await asyncio.Event().wait()
        finally:  # cancelled by asyncio.run once its own handler is gone
            guard.restore()

    hook, before = sys.excepthook, signal.getsignal(signal.SIGINT)
    try:
        asyncio.run(leave_open())
        assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, before)
        sys.excepthook = hook


async def test_signals_that_come_together_are_one_request():
    guard, asked = RunGuard(), []
    hook = sys.excepthook

    async def save():
        asked.append("save")
        return "; saved"

    guard.install(save)
    try:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(0)
        with pytest.raises(Interrupted, match="ended by SIGTERM; saved"):
            await guard.watch(asyncio.sleep(60))
        assert asked == ["save"]
    finally:
        guard.restore()
        sys.excepthook = hook


async def test_a_second_signal_does_not_wait_for_the_save(monkeypatch):
    monkeypatch.setattr("miles.ray.guard._ONE_REQUEST", 0.0)
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


def told(error: BaseException, capsys) -> str:
    try:
        raise error
    except BaseException as caught:
        tell(type(caught), caught, caught.__traceback__)
    return capsys.readouterr().err


def from_worker(error: BaseException, file: Path | str) -> BaseException:
    trace = f'Traceback (most recent call last):\n  File "{file}", line 1, in innermost\n{type(error).__name__}: {error}'
    error.__notes__ = [f"{WORKER_NOTE}executor (log: somewhere):\n\n{trace}"]
    return error


@pytest.mark.parametrize("error", [ValueError("mine"), RuntimeError("mine")])
def test_a_fault_in_a_users_function_is_its_own_traceback_alone(capsys, error):
    text = told(from_worker(error, "/home/me/my_rewards.py"), capsys)
    assert text.startswith("In worker executor")
    assert text.endswith(f'File "/home/me/my_rewards.py", line 1, in innermost\n{type(error).__name__}: mine\n')
    assert "test_guard.py" not in text


def test_what_the_house_refuses_is_one_line_and_exit_code_2(capsys):
    with pytest.raises(SystemExit) as end:
        told(from_worker(ValueError("data.jsonl, line 2: no prompt"), HOUSE / "data" / "dataset.py"), capsys)
    assert end.value.code == 2
    assert capsys.readouterr().err == "miles: data.jsonl, line 2: no prompt\n"
    with pytest.raises(ValueError) as caught:
        load("nonsense", setting="--reward")
    with pytest.raises(SystemExit) as end:
        tell(ValueError, caught.value, caught.value.__traceback__)
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith("miles: --reward: 'nonsense' is neither built in")


def test_a_failed_reward_ends_with_the_users_line_and_nothing_else(capsys):
    report = 'reward failed\n\nTraceback (most recent call last):\n  File "my.py", line 2, in bad\nKeyError: 4'
    assert told(from_worker(RewardError(report), HOUSE / "rewards" / "reward.py"), capsys) == f"miles: {report}\n"


def test_a_fault_of_the_house_keeps_its_traceback(capsys):
    text = told(from_worker(KeyError("lost"), HOUSE / "data" / "dataset.py"), capsys)
    assert "dataset.py" in text
    assert text.rstrip().endswith("KeyError: 'lost'")


def test_an_interrupt_before_the_run_has_the_signals_is_one_line(capsys):
    caught = KeyboardInterrupt()
    with pytest.raises(SystemExit) as end:
        tell(KeyboardInterrupt, caught, None)
    assert (end.value.code, capsys.readouterr().err) == (130, "miles: ended by SIGINT\n")
