"""One executor and a thousand engines: samples a second, memory over many groups, and what is left at the end.

    python benchmarks/executor_scale.py --json scale.json

The executor, its reward, packing and ledger are the real ones; each engine answers after a time drawn from the quantiles of a file (two
columns: quantile, seconds). Fully asynchronous; the trainer reads its share and frees it. The process does nothing else.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import gc
import random
import tempfile
import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

import psutil
from null_run import TOKENS, write_prompts
from report import machine, table, write

from miles.config.run_config import RunConfig
from miles.ray.object_store import ProcessStore
from miles.rollout.rollout_executor import RolloutExecutor
from miles.tracking import ledger
from miles.train.random_model import ensure_model
from miles.types import Completion, FinishReason, GenerateRequest, VersionSpan

STRAGGLERS = 4
"""So many times the groups that slots hold may be in flight: most wait for the last of their siblings only."""


class Latencies:
    """Draws from quantiles, with straight lines between them."""

    def __init__(self, path: str, seed: int) -> None:
        with open(path, newline="") as file:
            points = [(float(row["quantile"]), float(row["seconds"])) for row in csv.DictReader(file)]
        self._quantiles, self._seconds = zip(*sorted(points), strict=True)
        if (self._quantiles[0], self._quantiles[-1]) != (0.0, 1.0):
            raise ValueError(f"{path}: the quantiles go from {self._quantiles[0]} to {self._quantiles[-1]}, not from 0 to 1")
        self._dice = random.Random(seed)

    def draw(self) -> float:
        at = self._dice.random()
        place = bisect_right(self._quantiles, at) - 1
        low, high = self._quantiles[place : place + 2]
        return self._seconds[place] + (at - low) / (high - low) * (self._seconds[place + 1] - self._seconds[place])


class InFlight:
    """Requests inside all engines: how many, the most, and the mean over time since `restart`."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.restart()

    def restart(self) -> None:
        self._begun = self._changed = time.perf_counter()
        self._area = 0.0

    def change(self, by: int) -> None:
        moment = time.perf_counter()
        self._area += self.now * (moment - self._changed)
        self._changed = moment
        self.now += by
        self.most = max(self.most, self.now)

    def mean(self) -> float:
        self.change(0)
        return self._area / (self._changed - self._begun)


class Engine:
    """Answers every request after a while."""

    def __init__(self, latencies: Latencies, scale: float, in_flight: InFlight) -> None:
        self.latencies, self.scale, self.in_flight = latencies, scale, in_flight
        self.version = self.running = self.most = 0

    async def generate(self, request: GenerateRequest) -> Completion:
        self.running += 1
        self.most = max(self.most, self.running)
        self.in_flight.change(1)
        try:
            await asyncio.sleep(self.latencies.draw() * self.scale)
        finally:
            self.running -= 1
            self.in_flight.change(-1)
        tokens = [5 + request.sampling.seed % 200] * TOKENS
        return Completion(request.request_id, tokens, [-0.5] * TOKENS, FinishReason.LENGTH, [VersionSpan(0, TOKENS, self.version)])

    async def abort(self, request_ids: list[str] | None = None) -> int:
        return 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, default=1000)
    parser.add_argument("--in-flight", type=int, default=16_000, help="requests")
    parser.add_argument("--groups", type=int, default=100_000, help="groups in all")
    parser.add_argument("--batch", type=int, default=500, help="groups of a rollout")
    parser.add_argument("--siblings", type=int, default=8)
    parser.add_argument("--latencies", default=str(Path(__file__).parent / "latencies.csv"))
    parser.add_argument("--scale", type=float, default=1.0, help="times the latencies")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(Path(folder), options))
    rows = [[name, f"{value:,.2f}" if isinstance(value, float) else f"{value:,}"] for name, value in found.items() if name != "memory_mb"]
    print(table(["", "measured"], rows))
    write(options.json, {"machine": machine("cpu"), "options": vars(options), **found})


def settings(folder: Path, options: argparse.Namespace) -> RunConfig:
    args = RunConfig(
        hf_checkpoint=str(ensure_model("random:tiny", 0)),
        prompt_data=str(write_prompts(folder / "prompts.jsonl")),
        run_root=str(folder),
        name="scale",
        reward="null_run.reward",
        reward_workers=0,
        fully_async=True,
        num_rollout=options.groups // options.batch,
        rollout_batch_size=options.batch,
        n_samples_per_prompt=options.siblings,
        max_response_length=TOKENS,
        max_weight_staleness=-(-STRAGGLERS * options.in_flight // (options.siblings * options.batch)) + 1,
        engine_max_running=-(-options.in_flight // options.engines),
        save_samples=0,
    )
    Path(args.run_dir).mkdir(parents=True)
    return args


async def measure(folder: Path, options: argparse.Namespace) -> dict[str, Any]:
    args, store, latencies = settings(folder, options), ProcessStore(), Latencies(options.latencies, seed=0)
    in_flight = InFlight()
    engines = [Engine(latencies, options.scale, in_flight) for _ in range(options.engines)]
    executor = RolloutExecutor(args, store)
    await executor.init(list(engines))  # type: ignore[arg-type]  # only what an executor asks of engines
    await executor.set_weight_version(1)
    process, memory, marks = psutil.Process(), [], []
    assert args.num_rollout is not None
    begun = args.num_rollout // 5  # by then as many are in flight as may be
    mean = 0.0
    for rollout_id in range(args.num_rollout):
        ref = await executor.get(rollout_id)
        if executor.data.state()["next_group_index"] < args.num_rollout * options.batch:  # until the last is started
            mean = in_flight.mean()
        for share in ref.shares:
            assert store.get(share).data.num_samples == options.batch * options.siblings
        store.free(ref.shares)
        await executor.note_trained(rollout_id, rollout_id + 1)
        for engine in engines:
            engine.version = rollout_id + 2
        await executor.set_weight_version(rollout_id + 2)
        marks.append((time.perf_counter(), time.process_time()))
        memory.append(process.memory_info().rss / 1e6)
        if rollout_id == begun:
            in_flight.restart()
    left = {"objects in the store": store.count(), "requests in flight": in_flight.now}
    await executor.dispose()
    books = ledger.balance(ledger.read(Path(args.run_dir) / "ledger.jsonl"))
    assert books.holds, str(books)
    assert books.ended["trained"] == args.num_rollout * options.batch, str(books)
    gc.collect()
    samples = (len(marks) - 1 - begun) * options.batch * options.siblings
    wall, cpu = (marks[-1][place] - marks[begun][place] for place in (0, 1))
    return {
        "engines": options.engines,
        "requests in flight, mean": mean,
        "requests in flight, most": in_flight.most,
        "requests inside one engine, most": max(engine.most for engine in engines),
        "groups": args.num_rollout * options.batch,
        "samples a second": samples / wall,
        "samples a CPU second": samples / cpu,
        "memory after a fifth, MB": memory[begun],
        "memory at the end, MB": memory[-1],
        **{f"{name} at the end": value for name, value in left.items()},
        "memory_mb": memory,
    }


if __name__ == "__main__":
    main()
