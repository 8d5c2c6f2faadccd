"""When evaluations run, wait, are given up, and what is left on disk."""

import asyncio
import logging
import os

import pytest

from miles.config.run_config import RunConfig
from miles.ray.rollout.eval_dispatch import EvalDispatcher


class Actor:
    def __init__(self, fails=False):
        self.fails = fails

    async def export_hf(self, rollout_id, path):
        if self.fails:
            raise OSError("disk full")
        os.makedirs(path)


class Executor:
    """Evaluations end when the test says so."""

    def __init__(self):
        self.running = {}
        self.done = []
        self.skipped = []
        self.gates = {}

    def gate(self, rollout_id):
        return self.gates.setdefault(rollout_id, asyncio.Event())

    async def eval(self, rollout_id, hf_dir=None):
        self.running[rollout_id] = hf_dir
        await self.gate(rollout_id).wait()
        del self.running[rollout_id]
        if rollout_id == 13:
            raise RuntimeError("out of luck")
        self.done.append(rollout_id)

    async def report_eval_skip(self, rollout_id, reason):
        self.skipped.append((rollout_id, reason))


def settings(tmp_path, **values):
    return RunConfig(run_root=str(tmp_path), eval_mode="snapshot", eval_function="x.y", **values)


async def settled():
    for _ in range(20):
        await asyncio.sleep(0)


async def test_shared_engines_make_dispatch_wait():
    executor = Executor()
    dispatcher = EvalDispatcher(RunConfig(), Actor(), executor)
    task = asyncio.ensure_future(dispatcher.dispatch(3))
    await settled()
    assert executor.running == {3: None}
    assert not task.done()
    executor.gate(3).set()
    await task
    assert executor.done == [3]


@pytest.mark.case("C75")
async def test_snapshots_run_beside_and_the_oldest_is_waited_for(tmp_path):
    executor = Executor()
    dispatcher = EvalDispatcher(settings(tmp_path), Actor(), executor)
    await dispatcher.dispatch(1)
    await dispatcher.dispatch(2)
    third = asyncio.ensure_future(dispatcher.dispatch(3))
    await settled()
    assert sorted(executor.running) == [1, 2]
    executor.gate(1).set()
    await third
    await settled()
    assert sorted(executor.running) == [2, 3]
    drained = asyncio.ensure_future(dispatcher.drain())
    for rollout_id in (3, 2):
        executor.gate(rollout_id).set()
    await drained
    assert sorted(executor.done) == [1, 2, 3]


async def test_busy_skips_when_asked_unless_forced(tmp_path):
    executor = Executor()
    dispatcher = EvalDispatcher(settings(tmp_path, eval_when_busy="skip", eval_max_in_flight=1), Actor(), executor)
    await dispatcher.dispatch(1)
    await dispatcher.dispatch(2)
    assert executor.skipped == [(2, "busy")]
    forced = asyncio.ensure_future(dispatcher.dispatch(3, force=True))
    await settled()
    assert not forced.done()
    for rollout_id in (1, 3):
        executor.gate(rollout_id).set()
    await forced
    await dispatcher.drain()
    assert executor.done == [1, 3]


async def test_what_fails_costs_its_point_with_a_reason(tmp_path, caplog):
    executor = Executor()
    await EvalDispatcher(settings(tmp_path), Actor(fails=True), executor).dispatch(5)
    dispatcher = EvalDispatcher(settings(tmp_path), Actor(), executor)
    with caplog.at_level(logging.WARNING):
        await dispatcher.dispatch(6, hf_dir=str(tmp_path / "nowhere"))
        executor.gate(13).set()
        await dispatcher.dispatch(13)
        await dispatcher.drain()
    assert executor.skipped == [(5, "export_failed"), (6, "ckpt_missing"), (13, "crashed")]
    assert "out of luck" in caplog.text


async def test_old_snapshots_go_and_given_ones_stay(tmp_path):
    executor = Executor()
    given = tmp_path / "given"
    given.mkdir()
    dispatcher = EvalDispatcher(settings(tmp_path, eval_hf_dir=str(tmp_path / "hf"), eval_keep_snapshots=2), Actor(), executor)
    for rollout_id in range(5):
        executor.gate(rollout_id).set()
        await dispatcher.dispatch(rollout_id, hf_dir=str(given) if rollout_id == 0 else None)
    await dispatcher.drain()
    assert sorted(path.name for path in (tmp_path / "hf").iterdir()) == ["rollout_000003", "rollout_000004"]
    assert given.is_dir()
