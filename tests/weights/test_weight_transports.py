"""Every transport between real processes: same bytes on both ends, and what happens when an end dies."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from engine_process import EngineProcess, engines, publish, settings, shapes_of

from miles.weights import disk, shared_memory
from miles.weights.broadcast_group import address_toward, own_address
from miles.weights.buckets import view_of
from miles.weights.checksum import checksum
from miles.weights.receiver import WeightLoader
from miles.weights.sender import WeightPublisher

SHM = shared_memory.directories()[0]
TRANSPORTS = ["shared_memory", "broadcast", "disk"]


def some_weights(seed: int) -> dict[str, torch.Tensor]:
    """About 3 MB: several buckets of 1 MiB, one tensor larger than a bucket, scalars and empty ones, several types."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "embed": torch.randn(700, 500, generator=generator),
        "scalar": torch.randn((), generator=generator),
        "empty": torch.zeros(0, 7),
        "half": torch.randn(301, 333, generator=generator).bfloat16(),
        "norm": torch.randn(13, generator=generator),
        "count": torch.randint(0, 100, (5,), generator=generator),
        "mlp": torch.randn(300, 700, generator=generator),
        "odd": torch.randint(0, 255, (77,), generator=generator, dtype=torch.uint8),
        "head": torch.randn(40, 500, generator=generator),
    }


@pytest.fixture(scope="module")
def pair() -> Iterator[list[EngineProcess]]:
    with engines(2) as processes:
        yield processes


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_engines_have_what_was_sent_after_every_publish(transport: str, pair: list[EngineProcess], tmp_path: Path) -> None:
    publisher = WeightPublisher(
        shapes_of(some_weights(0)), settings(name=f"t-{transport}", weight_transport=transport, weight_sync_dir=str(tmp_path))
    )
    for engine in pair:
        engine.call("make", shapes_of(some_weights(0)), 20.0)
    for version in (1, 2, 3):
        weights = some_weights(version)
        sent, *received = publish(publisher, weights, pair, version)
        assert list(sent) == list(weights)
        assert received == [sent, sent]
        for engine in pair:
            values = engine.call("values")
            assert all(torch.equal(values[name], weights[name]) for name in weights)
    publisher.dispose()
    publisher.dispose()
    assert list(tmp_path.iterdir()) == []


def test_no_checksums_when_verification_is_off(pair: list[EngineProcess]) -> None:
    publisher = WeightPublisher(shapes_of(some_weights(0)), settings(verify_weight_updates=False))
    pair[0].call("make", shapes_of(some_weights(0)), 20.0)
    assert publish(publisher, some_weights(4), pair[:1], 1) == [{}, {}]
    assert torch.equal(pair[0].call("values")["embed"], some_weights(4)["embed"])
    publisher.dispose()


def test_bucket_i_plus_1_may_be_filled_before_bucket_i_is_read() -> None:
    weights = some_weights(5)
    publisher, loader = WeightPublisher(shapes_of(weights), settings(name="ahead")), None
    parameters = {name: torch.zeros_like(tensor) for name, tensor in weights.items()}
    loader = WeightLoader(parameters)
    plan = publisher.plan(1)
    loader.begin(plan, 0)
    bucket = lambda index: [(spec.name, weights[spec.name]) for spec in plan.buckets[index]]  # noqa: E731
    publisher.send_bucket(0, bucket(0))
    for index in range(len(plan.buckets)):
        if index + 1 < len(plan.buckets):
            publisher.send_bucket(index + 1, bucket(index + 1))
        loader.receive(index)
    assert loader.finish() == publisher.checksums()
    publisher.dispose()
    assert all(torch.equal(parameters[name], weights[name]) for name in weights)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publish_after_a_failed_one_is_whole(transport: str, pair: list[EngineProcess], tmp_path: Path) -> None:
    weights = some_weights(6)
    publisher = WeightPublisher(shapes_of(weights), settings(name="again", weight_transport=transport, weight_sync_dir=str(tmp_path)))
    for engine in pair:
        engine.call("make", shapes_of(weights), 20.0)
    for _ in range(2):
        plan = publisher.plan(1, num_receivers=2)
        for rank, engine in enumerate(pair):
            engine.call("begin", plan, rank)
        with pytest.raises(ValueError, match=r"bucket 0 lacks"):
            publisher.send_bucket(0, [])
        publisher.close()
        for engine in pair:
            engine.call("abort")
            engine.call("abort")
        sent, *received = publish(publisher, weights, pair, 1)
        assert received == [sent, sent]
    publisher.dispose()


def test_broadcast_follows_engines_that_come_and_go(pair: list[EngineProcess]) -> None:
    weights = some_weights(7)
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport="broadcast"))
    first, second = pair
    with engines(1) as (third,):
        for engine in (first, second, third):
            engine.call("make", shapes_of(weights), 20.0)
        for members in ([first, second], [first, second], [second], [second, first, third], [first, third, second], [third]):
            sent, *received = publish(publisher, weights, members, 1)
            assert received == [sent] * len(members)
        second.call("make", shapes_of(weights), 20.0)  # as after a restart: the same rank, another engine
        sent, *received = publish(publisher, weights, [third, second], 2)
        assert received == [sent, sent]
    publisher.dispose()


def send_all(publisher: WeightPublisher, weights: dict[str, torch.Tensor]) -> None:
    for index, bucket in enumerate(publisher.buckets):
        publisher.send_bucket(index, [(spec.name, weights[spec.name]) for spec in bucket])


def test_broadcast_to_an_engine_that_dies_fails_at_once_and_the_next_publish_works(pair: list[EngineProcess]) -> None:
    weights = some_weights(8)
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport="broadcast"))
    with engines(1) as (victim,):
        members = [*pair, victim]
        for engine in members:
            engine.call("make", shapes_of(weights), 20.0)
        publish(publisher, weights, members, 1)
        plan = publisher.plan(2, num_receivers=3)
        for rank, engine in enumerate(members):
            engine.call("begin", plan, rank)
        victim.kill()
        started = time.monotonic()
        with ThreadPoolExecutor(3) as pool:
            calls = [pool.submit(engine.call, "receive", 0) for engine in pair]
            with pytest.raises(RuntimeError):
                send_all(publisher, weights)
            publisher.close()
            for call in calls:
                call.exception()
        assert time.monotonic() - started < 10
        for engine in pair:
            engine.call("abort")
        sent, *received = publish(publisher, weights, pair, 2)
        assert received == [sent, sent]
    publisher.dispose()


def test_broadcast_that_an_engine_gives_up_does_not_hold_the_trainer(pair: list[EngineProcess]) -> None:
    weights = some_weights(9)
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport="broadcast"))
    pair[0].call("make", shapes_of(weights), 20.0)
    plan = publisher.plan(1, num_receivers=2)
    pair[0].call("begin", plan, 0)  # rank 1 never comes, and the driver aborts the one that did
    with ThreadPoolExecutor(1) as pool:
        sending = pool.submit(publisher.send_bucket, 0, [(spec.name, weights[spec.name]) for spec in plan.buckets[0]])
        started = time.monotonic()
        pair[0].call("abort")
        with pytest.raises(RuntimeError, match="gave this publish up"):
            sending.result()
        assert time.monotonic() - started < 5
    publisher.dispose()


def test_broadcast_names_the_engine_that_does_not_come() -> None:
    weights = {"a": torch.ones(2)}
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport="broadcast", publish_timeout=0.5))
    publisher.plan(1, num_receivers=2)
    with pytest.raises(TimeoutError, match=r"engines \['0', '1'\] of 2 did not come"):
        publisher.send_bucket(0, weights.items())
    publisher.dispose()


def test_broadcast_refuses_a_rank_that_is_taken_or_does_not_exist() -> None:
    weights = {"a": torch.ones(2)}
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport="broadcast"))
    one, two = WeightLoader(dict(weights)), WeightLoader(dict(weights))
    plan = publisher.plan(1, num_receivers=2)
    one.begin(plan, 0)
    with pytest.raises(ValueError, match="two engines"):
        two.begin(plan, 0)
    with pytest.raises(ValueError, match="rank 2"):
        two.begin(plan, 2)
    publisher.dispose()
    one.dispose()
    two.dispose()


KILLED_SENDER = """
import os, sys, torch
from miles.config.run_config import RunConfig
from miles.weights.sender import WeightPublisher
weights = {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)}
args = RunConfig(name="victim", weight_bucket_mb=1, weight_transport=sys.argv[1], weight_sync_dir=sys.argv[2])
publisher = WeightPublisher([(name, tensor.dtype, tensor.shape) for name, tensor in weights.items()], args)
plan = publisher.plan(1)
publisher.send_bucket(0, [("a", weights["a"])])
child = os.fork()
if not child:
    sys.exit(0)  # a forked child that ends must not take along what is its parent's
os.waitpid(child, 0)
print("ready", flush=True)
sys.stdin.read()
"""


def child_environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}


def killed_sender(transport: str, where: Path) -> subprocess.Popen[str]:
    """One that is in the midst of its first publish."""
    child = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", KILLED_SENDER, transport, str(where)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=child_environment(),
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    return child


def test_a_killed_sender_leaves_nothing_in_shared_memory() -> None:
    child = killed_sender("shared_memory", SHM)
    opened = [os.readlink(descriptor) for descriptor in Path(f"/proc/{child.pid}/fd").iterdir()]
    child.send_signal(signal.SIGKILL)
    child.communicate("")
    segments = [path for path in opened if path.startswith(f"{SHM}/")]
    assert segments
    assert all(path.endswith(" (deleted)") for path in segments), "without a name it goes with its last process"


def test_a_killed_sender_leaves_nothing_on_disk_after_the_next_start(tmp_path: Path) -> None:
    child = killed_sender("disk", tmp_path)
    left = lambda: [*tmp_path.glob("*victim*")]  # noqa: E731
    weights = {"a": torch.ones(3)}
    args = settings(name="next", weight_transport="disk", weight_sync_dir=str(tmp_path))
    publisher = WeightPublisher(shapes_of(weights), args)
    publisher.plan(1)
    assert left(), "a living sender's files must stay"
    publisher.dispose()
    child.send_signal(signal.SIGKILL)
    child.communicate("")
    assert left()
    publisher.plan(2)
    assert not left()
    publisher.dispose()


def too_much() -> int:
    return os.statvfs(SHM).f_blocks * os.statvfs(SHM).f_frsize * 2


def test_too_little_shared_memory_is_said() -> None:
    sender = shared_memory.Sender([SHM])
    free = os.statvfs(SHM).f_bavail
    with pytest.raises(ValueError, match=r"MiB more are needed and fit neither in /.* MiB free .*--weight-bucket-mb"):
        sender.open([64, too_much()], 1, 1)
    sender.dispose()
    assert os.statvfs(SHM).f_bavail >= free // 2, "what was reserved in vain is given back"


def test_a_file_stands_in_for_shared_memory_that_is_too_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    small = tmp_path / "small"
    small.mkdir()
    real = os.posix_fallocate

    def full(descriptor: int, start: int, nbytes: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").startswith(str(small)):
            raise OSError(28, "No space left on device")
        real(descriptor, start, nbytes)

    monkeypatch.setattr(os, "posix_fallocate", full)
    sender = shared_memory.Sender([small, tmp_path])
    path, _ = sender.open([64, 32], 1, 1)["address"]
    assert Path(os.readlink(path)).parent == tmp_path
    assert "--shm-size" in caplog.text
    sender.dispose()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_shared_memory_that_is_gone_is_said() -> None:
    weights = {"a": torch.ones(3)}
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport="shared_memory"))
    plan = publisher.plan(1)
    publisher.dispose()
    with pytest.raises(ValueError, match="its trainer is gone"):
        WeightLoader(dict(weights)).begin(plan, 0)
    with open("/dev/zero", "rb") as other:  # as its number is free, it may be another file's by then
        channel = {**plan.channel, "address": (f"/proc/{os.getpid()}/fd/{other.fileno()}", plan.channel["address"][1])}
        with pytest.raises(ValueError, match="its trainer is gone"):
            WeightLoader(dict(weights)).begin(replace(plan, channel=channel), 0)


def test_an_engine_that_comes_later_maps_what_the_others_have(pair: list[EngineProcess]) -> None:
    weights = some_weights(1)
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport="shared_memory"))
    for engine in pair:
        engine.call("make", shapes_of(weights), 20.0)
    publish(publisher, weights, pair[:1], 1)
    sent, *received = publish(publisher, weights, pair, 2)
    assert received == [sent, sent]
    publisher.dispose()


def test_a_file_on_disk_is_complete_or_absent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sender = disk.Sender("half", tmp_path)
    folder = Path(sender.open([1000, 64], 1, 1)["folder"])
    sender.buffer(0).fill_(7)
    seen: list[list[str]] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda descriptor: (seen.append(sorted(os.listdir(folder))), real(descriptor)))
    sender.send(0)
    assert seen[0] == ["bucket-00000.part"], "written and synced before it has its name"
    assert seen[-1] == ["bucket-00000.bin"]

    def fails(descriptor: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fails)
    with pytest.raises(OSError, match="disk full"):
        sender.send(1)
    assert not (folder / "bucket-00001.bin").exists()
    monkeypatch.undo()
    sender.dispose()
    assert list(tmp_path.iterdir()) == []


def test_a_missing_or_short_file_is_an_error(tmp_path: Path) -> None:
    weights = {"a": torch.ones(100), "b": torch.ones(100)}
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport="disk", weight_sync_dir=str(tmp_path)))
    plan = publisher.plan(1)
    receiver = disk.Receiver(visible_seconds=0.01)
    receiver.open(plan, 0)
    with pytest.raises(ValueError, match="--weight-sync-dir"):
        receiver.receive(0)
    publisher.send_bucket(0, weights.items())
    os.truncate(Path(plan.channel["folder"]) / "bucket-00000.bin", 12)
    with pytest.raises(ValueError, match="has 12 bytes, planned were"):
        receiver.receive(0)
    publisher.dispose()


def damaged(kind: str, plan_buffer: torch.Tensor, bucket: tuple, weights: dict[str, torch.Tensor]) -> None:
    first, second = bucket
    if kind == "flipped bit":
        plan_buffer[first.offset + 401] ^= 4
    elif kind == "permuted":
        view_of(plan_buffer, first).copy_(weights["a"].flip(0))
    else:
        view_of(plan_buffer, first).copy_(weights["b"])
        view_of(plan_buffer, second).copy_(weights["a"])


@pytest.mark.parametrize("kind", ["flipped bit", "permuted", "swapped pair"])
def test_damage_on_the_way_shows_in_the_checksums(kind: str) -> None:
    weights = {"a": torch.randn(50, 40), "b": torch.randn(50, 40)}
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport="shared_memory"))
    loader = WeightLoader({name: torch.zeros_like(tensor) for name, tensor in weights.items()})
    plan = publisher.plan(1)
    loader.begin(plan, 0)
    publisher.send_bucket(0, weights.items())
    assert publisher._sender is not None
    damaged(kind, publisher._sender.buffer(0), plan.buckets[0], weights)
    loader.receive(0)
    sent, received = publisher.checksums(), loader.finish()
    assert sent["a"] != received["a"]
    assert (sent["b"] != received["b"]) == (kind == "swapped pair")
    assert sent["a"] == checksum(weights["a"], plan.checksum)
    publisher.dispose()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_publish_to_no_engine_at_all(transport: str, tmp_path: Path) -> None:
    weights = some_weights(1)
    publisher = WeightPublisher(shapes_of(weights), settings(weight_transport=transport, weight_sync_dir=str(tmp_path)))
    assert list(*publish(publisher, weights, [], 1)) == list(weights)
    publisher.dispose()


def test_addresses() -> None:
    assert address_toward("127.0.0.1", 80) == "127.0.0.1"
    assert socket.inet_aton(own_address())
