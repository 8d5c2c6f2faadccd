"""Publish stall: seconds in which an engine decodes nothing because new weights arrive, against the time of one copy of their bytes.

    python benchmarks/publish_stall.py --size tiny --json stall.json
    python benchmarks/publish_stall.py --size 8b --device cuda --dtype bfloat16

The trainer's end is this process, the engine, decoding requests all the while, another one, as in a run. The stall reaches from the
last token before the pause to the first one after it, less one ordinary step: pause, the bytes, the engine's checksums, resume, and
the cache that is computed anew are in it; of a staged publish every bucket was filled and summed before ("ready"). "Lost" is the
time for the tokens that are missing from the first bucket on, so that slower steps before the pause are in it too. The bound is one
copy of all bytes within this process (memcpy, or within a GPU's memory), measured here too.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import transformers
from report import machine, summary, table, write
from shapes import DTYPES, SIZES, make_model
from transformers import AutoConfig, AutoModelForCausalLM

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine
from miles.types import GenerateRequest, PublishPlan, SamplingParams
from miles.weights.sender import WeightPublisher

PARTS = ("ready", "pause", "move", "verify", "resume")


class Served:
    """In the engine's process: the engine, what keeps it busy, and a look at its progress."""

    def __init__(self, args: RunConfig, requests: int) -> None:
        self.engine = EmbeddedEngine(args, "engine")
        self.requests, self.length = requests, args.engine_max_context - 16
        self.tasks: list[asyncio.Task[Any]] = []

    async def start(self) -> None:
        await self.engine.init()

    async def fill(self) -> None:
        """Requests that go on for longer than a publish; until each has written some tokens."""
        await self.engine.abort()
        await asyncio.gather(*self.tasks)
        params = SamplingParams(self.length, ignore_eos=True)
        self.tasks = [
            asyncio.create_task(self.engine.generate(GenerateRequest(f"r{time.monotonic_ns()}-{i}.", [2 + i] * 8, params)))
            for i in range(self.requests)
        ]
        decoder, before = self.engine._core.ready, self.engine._core.ready.num_sampled
        while decoder.num_sampled < before + 8 * self.requests:  # noqa: ASYNC110 - another thread's progress
            await asyncio.sleep(0.001)

    async def step(self) -> float:
        """Seconds of an ordinary step: over many, and without looking at them meanwhile, which would slow them down."""
        decoder, spans = self.engine._core.ready, []
        while len(spans) < 2 or spans[-1][1] - spans[0][1] < 10 * self.requests:
            spans.append((decoder.last_progress, decoder.num_sampled))
            await asyncio.sleep(0.2)
        return (spans[-1][0] - spans[0][0]) / (spans[-1][1] - spans[0][1]) * self.requests

    async def last_token(self) -> tuple[float, int]:
        """When it was there, and how many there were."""
        return self.engine._core.ready.last_progress, self.engine._core.ready.num_sampled

    async def resume_and_wait(self) -> tuple[float, float, int]:
        """When it was resumed, when the first token after that was there, how many there are. The clock is the whole machine's."""
        before = self.engine._core.ready.num_sampled
        await self.engine.resume()
        resumed = time.monotonic()
        decoder = self.engine._core.ready
        while decoder.num_sampled == before:  # noqa: ASYNC110 - another thread's progress
            await asyncio.sleep(0.001)
        return resumed, decoder.last_progress, decoder.num_sampled

    async def stop(self) -> None:
        await self.engine.abort()
        await asyncio.gather(*self.tasks)
        await self.engine.dispose()


def serve(connection: Any, args: RunConfig, requests: int, threads: int) -> None:
    torch.set_num_threads(threads)
    transformers.logging.disable_progress_bar()
    served = Served(args, requests)

    async def answer() -> None:
        method = ""
        while method != "stop":
            method, arguments = await asyncio.to_thread(connection.recv)
            target = served if hasattr(served, method) else served.engine
            connection.send(await getattr(target, method)(*arguments))

    asyncio.run(answer())


class Remote:
    """The engine's process, as the trainer's end sees it. Answers come in the order of the calls."""

    def __init__(self, args: RunConfig, requests: int, threads: int) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=serve, args=(other, args, requests, threads), daemon=True)
        self.process.start()
        other.close()

    def begin(self, method: str, *arguments: Any) -> Callable[[], Any]:
        self.connection.send((method, arguments))
        return self.connection.recv

    def __call__(self, method: str, *arguments: Any) -> Any:
        return self.begin(method, *arguments)()


def publish(
    publisher: WeightPublisher, weights: dict[str, torch.Tensor], engine: Remote, version: int, options: argparse.Namespace
) -> dict[str, float]:
    """One publish as a run makes it; the seconds of its parts, and of the stall."""
    send = lambda index, bucket: publisher.send_bucket(index, [(spec.name, weights[spec.name]) for spec in bucket])  # noqa: E731
    engine("fill")
    step = engine("step")
    first, before = engine("last_token")
    begin = time.monotonic()
    plan: PublishPlan = publisher.plan(version, stage=options.stage)
    sent: dict[str, str] = {}
    if plan.staged:
        for index, bucket in enumerate(plan.buckets):
            send(index, bucket)
        sent = publisher.checksums()
        engine("begin_update", plan, 0)
    ready = time.monotonic()
    engine("pause", options.mode)
    last, _ = engine("last_token")
    paused = time.monotonic()
    if not plan.staged:
        engine("begin_update", plan, 0)
        reading = lambda: None  # noqa: E731
        for index, bucket in enumerate(plan.buckets):
            send(index, bucket)
            reading()
            reading = engine.begin("receive_bucket", index)
        reading()
    moved = time.monotonic()
    received = engine("end_update")
    sent = sent if plan.staged else publisher.checksums()
    assert received == sent, "the weights arrived wrong"
    verified = time.monotonic()
    resumed, again, after = engine("resume_and_wait")
    publisher.close()
    parts = dict(zip(PARTS, (ready - begin, paused - ready, moved - paused, verified - moved, resumed - verified), strict=True))
    lost = again - first - (after - before) / options.requests * step
    return parts | {"step": step, "first token": again - resumed, "stall": max(again - last - step, 0.0), "lost": lost}


def copy_seconds(nbytes: int, device: str, repeats: int) -> float:
    """Time of one copy of so many bytes: of a GiB at most, scaled."""
    part = min(nbytes, 1 << 30)
    source = torch.randint(0, 255, (part,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = []
    for _ in range(repeats + 1):
        begin = time.perf_counter()
        target.copy_(source)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds[1:]) * nbytes / part


def load_weights(folder: str, options: argparse.Namespace) -> dict[str, torch.Tensor]:
    """The trainer's tensors: other values than the engine's, in the trainer's type."""
    config = AutoConfig.from_pretrained(folder)
    with torch.device(options.device):
        model = AutoModelForCausalLM.from_config(config, dtype=DTYPES[options.trainer_dtype or options.dtype])
    return {name: tensor.detach() for name, tensor in model.named_parameters()}


def measure(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    args = RunConfig(
        name="publish-stall",
        hf_checkpoint=folder,
        device=options.device,
        dtype=options.dtype,
        engine_threads=options.threads,
        engine_max_running=options.requests,
        engine_max_context=options.context,
        weight_bucket_mb=options.bucket_mb,
        gpus_per_trainer=0.5,
        gpus_per_engine=0.5,
        weight_transport=options.transport,
        verify_weight_updates=options.verify,
    )
    engine = Remote(args, options.requests, options.threads)
    engine("start")
    weights = load_weights(folder, options)
    dtype = DTYPES[options.dtype]
    publisher = WeightPublisher([(name, dtype, tuple(tensor.shape)) for name, tensor in weights.items()], args, options.device)
    try:
        runs = [publish(publisher, weights, engine, version, options) for version in range(1, options.repeats + 2)]
        plan = publisher.plan(options.repeats + 2, stage=options.stage)
        transport, nbytes = plan.transport, sum(spec.nbytes for bucket in plan.buckets for spec in bucket)
    finally:
        publisher.dispose()
        engine("stop")
        engine.process.join(60)
    bound = copy_seconds(nbytes, options.device, options.repeats)
    seconds = {name: summary([run[name] for run in runs[1:]]) for name in runs[0]}
    return {
        "transport": transport,
        "staged": plan.staged,
        "bytes": nbytes,
        "buckets": len(plan.buckets),
        "copy_bound": bound,
        "seconds": seconds,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the engine, and on the wire")
    parser.add_argument("--trainer-dtype", choices=DTYPES, help="of the trainer's own weights; default: the engine's")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--mode", choices=["retract", "in_place"], default="in_place")
    parser.add_argument("--stage", action=argparse.BooleanOptionalAction, default=True, help="all buckets ready before the pause")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--requests", type=int, default=8, help="requests that the engine decodes meanwhile")
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--verify", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", help="where the model is written meanwhile; default: a temporary folder")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        make_model(SIZES[options.size], folder, options.dtype, options.device)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        result = measure(folder, options)
    report(options, result)


def report(options: argparse.Namespace, result: dict[str, Any]) -> None:
    seconds, bound = result["seconds"], result["copy_bound"]
    milliseconds = lambda name: f"{seconds[name]['median'] * 1000:.1f}"  # noqa: E731
    head = [
        "size",
        "GB",
        "by",
        "copy bound ms",
        *(f"{part} ms" for part in (*PARTS, "first token", "lost")),
        "stall ms",
        "spread",
        "stall / bound",
    ]
    row = [
        options.size,
        f"{result['bytes'] / 1e9:.3f}",
        f"{result['transport']}{'' if options.verify else ', not verified'}, {options.mode}",
        f"{bound * 1000:.1f}",
        *map(milliseconds, (*PARTS, "first token")),
        milliseconds("lost"),
        milliseconds("stall"),
        f"{seconds['stall']['least'] * 1000:.1f} to {seconds['stall']['most'] * 1000:.1f}",
        f"{seconds['stall']['median'] / bound:.2f}",
    ]
    print(table(head, [row]))
    write(options.json, {"options": vars(options), "machine": machine(options.device)} | result)


if __name__ == "__main__":
    main()
