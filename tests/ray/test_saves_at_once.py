"""The end of a training and a signal that comes in it both save; neither says so before all is on disk."""

import asyncio
from pathlib import Path

import pytest

from miles.config.run_config import RunConfig
from miles.ray.checkpoints import Checkpoints
from miles.ray.guard import RunGuard
from miles.ray.rollout.remote_executor import RemoteExecutor
from miles.ray.run import Run
from miles.ray.train.train_group import TrainGroup


class SlowRank:
    """Begins and ends its save when it is told to."""

    def __init__(self) -> None:
        self.may_begin, self.may_end = asyncio.Event(), asyncio.Event()

    async def save(self, rollout_id: int, folder: str, wait: bool) -> None:
        await self.may_begin.wait()

    async def wait_for_save(self) -> dict[str, object]:
        await self.may_end.wait()
        return {}


class SlowExecutor:
    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def save(self, rollout_id: int, folder: str, ahead: int | None, wait: bool) -> None:
        await self.may_end.wait()


@pytest.fixture
async def run(tmp_path: Path) -> Run:
    args = RunConfig(hf_checkpoint="random:tiny", prompt_data="recipes/tiny/sums.jsonl", run_root=str(tmp_path))
    run = Run(args, None, RunGuard(), Checkpoints(str(tmp_path)))  # type: ignore[arg-type]  # no worker is started
    run.checkpoints.parts = ("actor", "executor")
    return run


async def turn() -> None:
    """All that can go on goes on."""
    for _ in range(20):
        await asyncio.sleep(0)


@pytest.mark.parametrize("forced", [True, False])
async def test_whoever_asks_for_a_trainers_save_waits_for_it(run: Run, forced: bool) -> None:
    rank = SlowRank()
    group = TrainGroup(run.args, run, "actor", [rank])  # type: ignore[list-item]
    first = asyncio.create_task(group.save_model(3, force_sync=forced))
    await turn()
    second = asyncio.create_task(group.save_model(3, force_sync=True))
    await turn()
    assert not second.done(), "nothing is copied yet"
    rank.may_begin.set()
    await turn()
    assert not second.done(), "nothing is on disk yet"
    rank.may_end.set()
    await asyncio.gather(first, second)
    assert run.checkpoints._written[3] == {"actor"}


async def test_whoever_asks_for_an_executors_save_waits_for_it(run: Run) -> None:
    handle = SlowExecutor()
    executor = RemoteExecutor(run.args, run, handle)  # type: ignore[arg-type]
    first = asyncio.create_task(executor.save_now(3, grace=60))
    await turn()
    second = asyncio.create_task(executor.save_now(3, grace=60))
    third = asyncio.create_task(executor.settle_save())
    await turn()
    assert not any(task.done() for task in (first, second, third))
    handle.may_end.set()
    await asyncio.gather(first, second, third)
    assert run.checkpoints._written[3] == {"executor"}
