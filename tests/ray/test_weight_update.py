"""The publish: order, proof, retries, lost engines."""

import asyncio
from types import SimpleNamespace

import pytest

from miles.config.run_config import RunConfig
from miles.ray import run as runs
from miles.ray import weight_update
from miles.ray.guard import RunGuard
from miles.ray.worker_handle import CallTimeout, WorkerDied
from miles.types import PublishPlan, TensorSpec


class Trainer:
    def __init__(self, events, buckets=3, transport="shared_memory", staged=False):
        self.events, self.buckets, self.transport, self.staged = events, buckets, transport, staged
        self.value = "aa"

    async def plan_publish(self, version, num_receivers, one_host):
        buckets = tuple((TensorSpec(f"w{i}", "float32", (2,), 0, 8),) for i in range(self.buckets))
        return PublishPlan(version, self.transport, buckets, (8,) * self.buckets, {}, "xxh3_64", self.staged)

    async def send_bucket(self, index):
        self.events.append(f"send {index}")
        await asyncio.sleep(0)

    async def end_publish(self):
        return {f"w{i}": self.value for i in range(self.buckets)}

    async def abort_publish(self):
        self.events.append("trainer aborts")


class Engine:
    def __init__(self, events, name="e"):
        self.events, self.name = events, name
        self.sums = {f"w{i}": "aa" for i in range(3)}
        self.fails = []
        self.deaf, self.ended = False, asyncio.Event()

    async def health(self):
        if self.deaf:
            raise CallTimeout("no answer")

    async def begin_update(self, plan, receiver_rank):
        self.events.append(f"{self.name} begins as {receiver_rank}")

    async def receive_bucket(self, index):
        self.events.append(f"{self.name} reads {index}")
        for _ in range(3):
            await asyncio.sleep(0)
        if self.fails:
            raise self.fails.pop()
        self.events.append(f"{self.name} has {index}")

    async def end_update(self):
        self.events.append(f"{self.name} ends")
        return self.sums

    async def abort_update(self):
        self.events.append(f"{self.name} aborts")


async def end(engine):
    engine.events.append(f"{engine.name} ended")
    engine.ended.set()


@pytest.fixture
def args():
    return RunConfig(control_timeout=0.05, start_rollout_id=0, update_weights_interval=2, publish_retries=1)


async def test_at_most_two_buckets_are_on_their_way(args):
    events = []
    await weight_update.move(args, [Trainer(events)], [Engine(events)], 1, end_engine=end)
    assert events.index("send 1") < events.index("e has 0") < events.index("send 2")
    assert events.index("e has 1") < events.index("e reads 2")


async def test_of_a_staged_publish_only_the_engines_own_part_is_in_the_pause(args):
    events = []

    async def pause():
        events.append("pause")
        return [engine]

    engine = Engine(events)
    await weight_update.move(args, [Trainer(events, staged=True)], [engine], 1, end_engine=end, pause=pause)
    assert events == ["send 0", "send 1", "send 2", "e begins as 0", "pause", "e ends"]


@pytest.mark.parametrize("staged", [False, True])
async def test_an_engine_that_could_not_be_paused_is_published_without(args, staged):
    async def pause():
        return [second]

    events = []
    first, second = Engine(events, "a"), Engine(events, "b")
    with pytest.raises(weight_update.EngineLost, match="paused"):
        await weight_update.move(args, [Trainer(events, staged=staged)], [first, second], 1, end_engine=end, pause=pause)
    assert "b ends" not in events
    assert events[-3:] == ["trainer aborts", "a aborts", "b aborts"]


async def test_a_collective_sends_and_reads_at_once(args):
    events = []
    await weight_update.move(args, [Trainer(events, transport="broadcast")], [Engine(events, "a"), Engine(events, "b")], 1, end_engine=end)
    assert events[2:5] == ["send 0", "a reads 0", "b reads 0"] or set(events[2:5]) == {"send 0", "a reads 0", "b reads 0"}
    assert events.index("b has 0") < events.index("send 1")


async def test_a_wrong_tensor_is_named_and_both_ends_give_up(args):
    events = []
    engine = Engine(events)
    engine.sums = {**engine.sums, "w1": "bb"}
    with pytest.raises(RuntimeError, match="version 4 arrived wrong at engine 0 of 1: 1 differ: w1"):
        await weight_update.move(args, [Trainer(events)], [engine], 4, end_engine=end)
    assert events[-2:] == ["trainer aborts", "e aborts"]
    await weight_update.move(args.model_copy(update={"verify_weight_updates": False}), [Trainer(events)], [engine], 4, end_engine=end)


def test_versions_count_publishes_and_a_resumed_run_counts_on(args):
    assert weight_update.version_after(args, None) == 1
    assert [weight_update.version_after(args, rollout) for rollout in (1, 3, 5)] == [2, 3, 4]
    resumed = RunConfig(start_rollout_id=4, update_weights_interval=2)
    assert weight_update.version_after(resumed, None) == 3
    assert weight_update.version_after(resumed, 5) == 4


class Actor:
    def __init__(self, args, events, engine):
        self.args, self.trainers = args, [Trainer(events)]

    async def update_weights(self, engines, rollout_id=None, pause=None):
        version = weight_update.version_after(self.args, rollout_id)
        await weight_update.move(self.args, self.trainers, engines, version, end_engine=end, pause=pause)
        return version


class Controller:
    def __init__(self, events, engines):
        self.events, self.engines = events, engines

    def living(self):
        return [engine for engine in self.engines if not getattr(engine, "dead", False)]

    async def start_update_weights(self):
        self.events.append("lock")
        return self.living()

    async def pause_engines(self):
        self.events.append("pause")
        return self.living()

    async def end_update_weights(self, weight_version):
        self.events.append(f"serve {weight_version}")

    async def abort_update_weights(self):
        self.events.append("release")
        for engine in self.engines:
            engine.dead = engine.name == "mortal"

    def on_resume(self, republish):
        self.republish = republish


class Executor:
    version = None

    async def quiet(self):
        pass

    async def set_weight_version(self, version):
        self.version = version


@pytest.fixture
async def world(args):
    events = []
    engine = Engine(events)
    run = SimpleNamespace(guard=RunGuard(), published=None, trained_through=None, trainers_idle=asyncio.Lock())
    runs.set_current(run)
    yield SimpleNamespace(
        events=events,
        engine=engine,
        run=run,
        actor=Actor(args, events, engine),
        executor=Executor(),
        controller=Controller(events, [engine]),
    )
    runs.set_current(None)


async def test_a_failed_publish_is_tried_again_once(args, world):
    world.engine.fails = [OSError("a glitch")]
    await weight_update.update_weights(args, world.actor, world.executor, world.controller)
    assert [event for event in world.events if event in ("pause", "release", "serve 1")] == ["pause", "release", "pause", "serve 1"]
    assert world.executor.version == 1
    world.engine.fails = [OSError("for good"), OSError("for good")]
    with pytest.raises(OSError, match="for good"):
        await weight_update.update_weights(args, world.actor, world.executor, world.controller, rollout_id=1)
    assert world.executor.version == 1


async def test_an_engine_that_dies_is_left_behind(args, world, tmp_path):
    mortal = Engine(world.events, "mortal")
    mortal.fails = [WorkerDied("mortal", str(tmp_path / "log"), "killed")]
    world.controller.engines = [mortal, world.engine]
    await weight_update.update_weights(args, world.actor, world.executor, world.controller)
    assert world.executor.version == 1
    assert "e begins as 0" in world.events[world.events.index("release") :]


@pytest.mark.parametrize("method", ["begin_update", "receive_bucket", "end_update"])
async def test_an_engine_that_hangs_is_ended_and_left_behind(args, world, tmp_path, method):
    mortal = Engine(world.events, "mortal")
    mortal.deaf = True

    async def hangs(*args):
        await mortal.ended.wait()
        raise WorkerDied("mortal", str(tmp_path / "log"), "it was ended by the run")

    setattr(mortal, method, hangs)
    world.controller.engines = [mortal, world.engine]
    async with asyncio.timeout(5):
        await weight_update.update_weights(args, world.actor, world.executor, world.controller)
    assert world.executor.version == 1
    after = world.events[world.events.index("mortal ended") :]
    assert after.index("trainer aborts") < after.index("release") < after.index("e begins as 0")


async def test_an_engine_that_is_slow_but_answers_is_waited_for(args, world):
    async def slow(index):
        await asyncio.sleep(0.2)

    world.engine.receive_bucket = slow
    await weight_update.update_weights(args, world.actor, world.executor, world.controller)
    assert world.executor.version == 1
    assert not world.engine.ended.is_set()


async def test_an_engine_that_answers_but_never_has_its_bucket_is_ended(args, world, tmp_path):
    """Its thread hangs while its event loop goes on: health is good, and nothing moves."""
    mortal = Engine(world.events, "mortal")

    async def hangs(index):
        await mortal.ended.wait()
        raise WorkerDied("mortal", str(tmp_path / "log"), "it was ended by the run")

    mortal.receive_bucket = hangs
    world.controller.engines = [mortal, world.engine]
    args = args.model_copy(update={"bucket_timeout": 0.3})
    world.actor.args = args
    async with asyncio.timeout(5):
        await weight_update.update_weights(args, world.actor, world.executor, world.controller)
    assert world.executor.version == 1
    assert mortal.ended.is_set()
    assert not world.engine.ended.is_set()


async def test_a_restarted_engine_gets_the_weights_of_this_moment(args, world):
    await weight_update.update_weights(args, world.actor, world.executor, world.controller)
    assert await world.controller.republish(world.engine) == 1
    world.run.trained_through = 0  # no publish is due after it
    assert await world.controller.republish(world.engine) == 1
    world.run.trained_through = 1
    assert await world.controller.republish(world.engine) == 2


async def test_a_publish_past_its_limit_says_so(args, world):
    async def never(index):
        await asyncio.Event().wait()

    async def stacks():
        return "stacks of all"

    world.engine.receive_bucket = never
    world.run.manager = SimpleNamespace(stacks=stacks)
    short = args.model_copy(update={"publish_timeout": 0.05, "publish_retries": 0})
    with pytest.raises(TimeoutError, match=r"--publish-timeout[\s\S]*stacks of all"):
        await weight_update.update_weights(short, world.actor, world.executor, world.controller)
