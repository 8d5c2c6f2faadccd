"""Engines as cells: served, paused, lost, suspended, started again; the lock; false alarms."""

import asyncio
import dataclasses
import os
from types import SimpleNamespace
from typing import ClassVar

import psutil
import pytest

from miles.config.run_config import RunConfig
from miles.ray.guard import RunGuard
from miles.ray.rollout.inference_controller import InferenceController
from miles.ray.wiring import engine_specs
from miles.ray.worker_manager import WorkerManager
from miles.ray.worker_spec import WorkerSpec
from miles.types import EngineHealth


class PlainEngine:
    """An engine whose state the test sets."""

    made: ClassVar[list] = []
    may_load: ClassVar[asyncio.Event | None] = None
    loads: ClassVar[bool] = True

    def __init__(self, name):
        self.name, self.paused, self.version, self.calls = name, False, 0, []
        self.stuck, self.glitches, self.answer = 0.0, [], {}
        PlainEngine.made.append(self)

    async def init(self):
        self.calls.append("init")
        if PlainEngine.may_load is not None:
            await PlainEngine.may_load.wait()
        if not PlainEngine.loads:
            raise OSError("no such checkpoint")

    async def pause(self, mode):
        self.calls.append("pause")
        if self.glitches:
            raise self.glitches.pop()
        self.paused = True

    async def resume(self):
        self.calls.append("resume")
        self.paused = False

    async def pid(self):
        return os.getpid()

    async def health(self):
        return EngineHealth(True, self.version, 0, 0, self.paused, self.stuck)

    async def check_weights(self, action, **options):
        return self.answer

    async def offload(self):
        self.calls.append("offload")

    async def onload(self):
        self.calls.append("onload")

    async def dispose(self):
        self.calls.append("dispose")


@pytest.fixture
async def world(tmp_path):
    PlainEngine.made, PlainEngine.may_load, PlainEngine.loads = [], None, True
    args = RunConfig(num_engines=2, health_interval=0.02, engine_stuck_timeout=5.0)
    manager = WorkerManager(str(tmp_path / "logs"))
    run = SimpleNamespace(manager=manager, guard=RunGuard())
    specs = [WorkerSpec(f"engine-{i}", f"{__name__}.PlainEngine", {"name": f"engine-{i}"}) for i in range(2)]
    handles = [await manager.start(spec) for spec in specs]
    controller = InferenceController(args, run, handles)
    told = []

    async def tell(index, live):
        told.append((index, live))

    controller.on_live(tell)
    await controller.init()
    yield SimpleNamespace(args=args, manager=manager, run=run, controller=controller, told=told, engines=PlainEngine.made)
    await controller.dispose()
    await manager.shutdown()


async def until(condition, seconds=5.0):
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 what is waited for is no event
            await asyncio.sleep(0.01)


def cell(world, index):
    return world.controller.cells()[index]


async def publish(world, version):
    engines = await world.controller.start_update_weights()
    assert not any(engine.paused for engine in world.engines if engine.calls[-1] == "resume")
    assert await world.controller.pause_engines() == engines
    assert all(engine.paused for engine in world.engines[-len(engines) :])
    await world.controller.end_update_weights(version)


async def test_engines_serve_from_the_first_publish_on(world):
    assert [c.status.phase for c in world.controller.cells()] == ["Pending", "Pending"]
    await publish(world, 1)
    assert [c.status.phase for c in world.controller.cells()] == ["Running", "Running"]
    assert [c.status.weight_version for c in world.controller.cells()] == [1, 1]
    assert not any(engine.paused for engine in world.engines)
    await until(lambda: all(c.condition("Healthy").status == "True" for c in world.controller.cells()))


@pytest.mark.case("C85")
async def test_a_passing_control_error_is_tried_again(world):
    world.engines[0].glitches = [OSError("502")]
    await publish(world, 1)
    assert world.engines[0].calls.count("pause") == 2


async def hangs(mode):
    await asyncio.Event().wait()


async def silent_engine_world(manager, num_engines):
    PlainEngine.made, PlainEngine.may_load = [], None
    args = RunConfig(num_engines=num_engines, health_interval=60.0, control_timeout=1.0)
    run = SimpleNamespace(manager=manager, guard=RunGuard())
    specs = [dataclasses.replace(spec, cls=f"{__name__}.PlainEngine", kwargs={"name": spec.name}) for spec in engine_specs(args)]
    handles = await manager.start_all(specs)
    controller = InferenceController(args, run, handles)
    await controller.init()
    return controller, handles


async def test_an_engine_that_does_not_pause_is_lost_and_the_publish_goes_on(process_manager):
    controller, handles = await silent_engine_world(process_manager, 2)
    next(engine for engine in PlainEngine.made if engine.name == "engine-0").pause = hangs
    async with asyncio.timeout(5):
        assert await controller.start_update_weights() == handles
        assert await controller.pause_engines() == handles[1:]
    reason = controller.cells()[0].condition("Healthy").reason
    assert "waited 1 s (--control-timeout) for pause of worker engine-0" in reason
    await controller.end_update_weights(1)
    await controller.dispose()


async def test_a_stopped_process_is_ended_and_the_last_one_ends_the_publish(ray_manager):
    controller, handles = await silent_engine_world(ray_manager, 1)
    pid = await handles[0].pid()
    await controller.inject_fault("engine-0", "hang")
    await until(lambda: psutil.Process(pid).status() == psutil.STATUS_STOPPED)
    assert await controller.start_update_weights() == handles
    assert await controller.pause_engines() == []
    await controller.abort_update_weights()
    with pytest.raises(RuntimeError, match=r"no engine is left to publish to:\nengine-0: .*--control-timeout"):
        await controller.start_update_weights()
    await until(lambda: not psutil.pid_exists(pid), 20.0)
    await controller.dispose()


async def test_suspend_waits_for_the_publish(world):
    await publish(world, 1)
    await world.controller.start_update_weights()
    suspending = asyncio.ensure_future(world.controller.suspend_cell("engine-0"))
    await asyncio.sleep(0.05)
    assert not suspending.done()
    await world.controller.end_update_weights(2)
    await suspending
    assert cell(world, 0).status.phase == "Suspended"
    assert len(await world.controller.start_update_weights()) == 1
    await world.controller.end_update_weights(3)


@pytest.mark.case("C79")
async def test_a_resumed_engine_serves_only_with_the_weights_of_the_run(world):
    await publish(world, 3)
    paused_at_republish = []

    async def republish(engine):
        paused_at_republish.append(world.engines[-1].paused)
        return 3

    world.controller.on_resume(republish)
    await world.controller.suspend_cell("engine-0")
    await until(lambda: world.told == [(0, False)])
    await world.controller.resume_cell("engine-0")
    await world.controller.resume_cell("engine-0")
    assert len(world.engines) == 3
    assert world.engines[-1].calls == ["init", "pause", "resume"]
    assert paused_at_republish == [True]
    assert cell(world, 0).status.weight_version == 3
    await until(lambda: world.told == [(0, False), (0, True)])


async def test_publishes_go_on_while_a_resumed_engine_loads(world):
    await publish(world, 1)
    republished = []

    async def republish(engine):
        republished.append(world.engines[-1].paused)
        return 3

    world.controller.on_resume(republish)
    await world.controller.suspend_cell("engine-0")
    gate = PlainEngine.may_load = asyncio.Event()
    resuming = asyncio.ensure_future(world.controller.resume_cell("engine-0"))
    await until(lambda: len(world.engines) == 3 and "init" in world.engines[-1].calls)
    async with asyncio.timeout(1):
        assert len(await world.controller.start_update_weights()) == 1
    gate.set()
    await until(lambda: world.engines[-1].paused)
    assert not republished
    await world.controller.end_update_weights(3)
    await resuming
    assert republished == [True]
    assert world.engines[-1].calls == ["init", "pause", "resume"]
    assert cell(world, 0).status.phase == "Running"


async def test_an_engine_that_does_not_load_again_is_suspended(world):
    await publish(world, 1)
    await world.controller.suspend_cell("engine-0")
    PlainEngine.loads = False
    with pytest.raises(OSError, match="no such checkpoint"):
        await world.controller.resume_cell("engine-0")
    assert cell(world, 0).status.phase == "Suspended"
    assert "did not start: no such checkpoint" in cell(world, 0).condition("Serving").reason
    PlainEngine.loads = True
    await world.controller.resume_cell("engine-0")
    assert len(await world.controller.start_update_weights()) == 2
    await world.controller.end_update_weights(2)


async def test_a_lost_engine_is_left_out_and_the_last_one_ends_the_run(world):
    await publish(world, 1)
    await world.manager.end("engine-0")
    await until(lambda: cell(world, 0).condition("Healthy").status == "False")
    await until(lambda: world.told == [(0, False)])
    assert len(await world.controller.start_update_weights()) == 1
    await world.controller.end_update_weights(2)
    await world.manager.end("engine-1")
    with pytest.raises(RuntimeError, match="no engine is left that works"):
        await world.run.guard.watch(asyncio.sleep(30))
    with pytest.raises(RuntimeError, match="no engine is left to publish to"):
        await world.controller.start_update_weights()


async def test_a_publish_waits_for_an_engine_that_may_be_started_again(world):
    await publish(world, 1)
    for part in (world.controller, world.controller._cells):
        part.args = world.args.model_copy(update={"api_server_port": 1})
    await world.controller.suspend_cell("engine-0")
    await world.controller.suspend_cell("engine-1")
    waiting = asyncio.ensure_future(world.controller.start_update_weights())
    await asyncio.sleep(0.05)
    assert not waiting.done()
    await world.controller.resume_cell("engine-1")
    assert len(await waiting) == 1
    await world.controller.end_update_weights(2)
    for part in (world.controller, world.controller._cells):
        part.args = world.args.model_copy(update={"api_server_port": 1, "engine_start_timeout": 0.05})
    await world.controller.suspend_cell("engine-1")
    with pytest.raises(RuntimeError, match="none came back within --engine-start-timeout"):
        await world.controller.start_update_weights()


@pytest.mark.case("C81")
async def test_an_engine_that_answers_but_never_writes_is_found_and_a_paused_one_is_not(world):
    await publish(world, 1)
    await world.controller.start_update_weights()
    await world.controller.pause_engines()
    world.engines[0].stuck = 100.0
    await asyncio.sleep(0.1)
    assert cell(world, 0).condition("Healthy").status != "False"
    world.engines[0].stuck = 0.0
    await world.controller.end_update_weights(2)
    world.engines[0].stuck = 100.0
    await until(lambda: world.told == [(0, False)])
    world.engines[0].stuck = 0.0
    await until(lambda: world.told == [(0, False), (0, True)])


async def test_differing_weights_are_listed_unless_skipped(world):
    world.engines[1].answer = {"layer.weight": "largest difference 0.5", "odd.bias": "small"}
    with pytest.raises(ValueError, match=r"engine-1: layer\.weight: largest difference") as caught:
        await world.controller.check_weights("compare", skip_list=["odd"])
    assert "odd.bias" not in str(caught.value)
    await world.controller.check_weights("compare", skip_list=["odd", "layer"])
    with pytest.raises(ValueError, match="not 'guess'"):
        await world.controller.check_weights("guess")


async def test_taking_turns(world):
    await publish(world, 1)
    await world.controller.offload()
    await world.controller.offload()
    await world.controller.prepare_rollout(1)
    await world.controller.prepare_rollout(2)
    assert [call for call in world.engines[0].calls if "load" in call] == ["offload", "onload"]
    await world.controller.offload()
    await publish(world, 2)
    assert [call for call in world.engines[0].calls if "load" in call] == ["offload", "onload", "offload", "onload"]


async def test_unknown_cells_are_refused(world):
    with pytest.raises(KeyError, match="engine-0, engine-1"):
        await world.controller.suspend_cell("engine-9")
    with pytest.raises(ValueError, match="no process of its own"):
        await world.controller.inject_fault("engine-0", "kill")
