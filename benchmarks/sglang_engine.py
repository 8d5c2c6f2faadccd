"""An SGLang engine: generated tokens per second against the same server driven directly, and what a publish costs.

    python benchmarks/sglang_engine.py --size ci --python .venv-sglang/bin/python --json sglang.json
    python benchmarks/sglang_engine.py --size 0.6b --device cuda --dtype bfloat16

Directly means: the same requests, all at once, from a bare asynchronous HTTP client in a process that does nothing else, without and with
the log-probs that training needs. The engine adds their pairing with tokens, versions, seeds. A publish is made while every request runs:
its parts are timed, and its stall is the time by which the whole work takes longer with publishes than without, so that prompts and tokens
computed anew are in it.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import statistics
import tempfile
import time
from functools import partial
from itertools import pairwise
from typing import Any

import aiohttp
import torch
import transformers
from publish_stall import copy_seconds, load_weights
from report import machine, summary, table, write
from shapes import DTYPES, SIZES, Work, make_model

from miles.config.run_config import RunConfig
from miles.engines.sglang.engine import SGLangEngine
from miles.types import GenerateRequest, SamplingParams
from miles.weights.sender import WeightPublisher

PARTS = ("ready", "pause", "move", "verify", "resume")
PIECE = itertools.count()


async def directly(url: str, work: Work, *, logprobs: bool) -> float:
    """Seconds for all requests with nothing of ours in between."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=None)) as session:

        async def one(prompt: list[int], length: int) -> None:
            params = {"max_new_tokens": length, "ignore_eos": True, "temperature": 1.0}
            question = {"input_ids": prompt, "sampling_params": params, "return_logprob": logprobs}
            async with session.post(f"{url}/generate", json=question) as response:
                assert len((await response.json())["output_ids"]) == length

        begin = time.perf_counter()
        await asyncio.gather(*map(one, work.prompts, work.lengths))
        return time.perf_counter() - begin


async def through(engine: SGLangEngine, work: Work) -> float:
    """Seconds for all requests through the engine."""
    name = next(PIECE)

    async def one(place: int, prompt: list[int], length: int) -> None:
        params = SamplingParams(length, ignore_eos=True, seed=place)
        answer = await engine.generate(GenerateRequest(f"{name}-{place}.", prompt, params))
        assert len(answer.token_ids) == length

    begin = time.perf_counter()
    await asyncio.gather(*(one(place, *pair) for place, pair in enumerate(zip(work.prompts, work.lengths, strict=True))))
    return time.perf_counter() - begin


async def publish(
    engine: SGLangEngine, publisher: WeightPublisher, weights: dict[str, torch.Tensor], version: int, *, stage: bool, mode: Any
) -> list[float]:
    """One publish as a run makes it: the seconds of its parts."""
    send = lambda index, bucket: publisher.send_bucket(index, [(spec.name, weights[spec.name]) for spec in bucket])  # noqa: E731
    marks = [time.perf_counter()]
    plan, sent = publisher.plan(version, stage=stage), {}
    if plan.staged:
        for index, bucket in enumerate(plan.buckets):
            await asyncio.to_thread(send, index, bucket)
        sent = publisher.checksums()
        await engine.begin_update(plan, 0)
    marks.append(time.perf_counter())
    await engine.pause(mode)
    marks.append(time.perf_counter())
    if not plan.staged:
        await engine.begin_update(plan, 0)
        reading: asyncio.Task[None] | None = None
        for index, bucket in enumerate(plan.buckets):
            send(index, bucket)
            if reading is not None:
                await reading
            reading = asyncio.create_task(engine.receive_bucket(index))
        assert reading is not None
        await reading
    marks.append(time.perf_counter())
    received = await engine.end_update()
    sent = sent if plan.staged else publisher.checksums()
    assert received == sent, "the weights arrived wrong"
    marks.append(time.perf_counter())
    await engine.resume()
    marks.append(time.perf_counter())
    publisher.close()
    return [after - before for before, after in pairwise(marks)]


async def measure(folder: str, options: argparse.Namespace) -> dict[str, Any]:
    size = SIZES[options.size]
    works = [Work.draw(size, options.siblings, seed) for seed in range(options.repeats + 1)]
    args = RunConfig(
        name="sglang-engine",
        run_root=options.folder or tempfile.gettempdir(),
        hf_checkpoint=folder,
        engine="sglang",
        sglang_python=options.python,
        sglang_seeds=options.seeds,
        device=options.device,
        dtype=options.dtype,
        weight_bucket_mb=options.bucket_mb,
        engine_max_running=size.requests,
        engine_max_context=max(work.context for work in works),
        gpus_per_trainer=0.5,
        gpus_per_engine=0.5,
        in_process=True,
        engine_start_timeout=600,
    )
    begin = time.perf_counter()
    engine = SGLangEngine(args, f"bench-{options.size}")
    publisher = None
    try:
        await engine.init()
        result: dict[str, Any] = {"start": time.perf_counter() - begin, "sglang": engine._version.text}
        assert engine._client is not None
        url = engine._client.url
        ways = {
            "direct": partial(directly, url, logprobs=False),
            "alike": partial(directly, url, logprobs=True),
            "engine": partial(through, engine),
        }
        seconds: dict[str, list[float]] = {way: [] for way in ways}
        for index, work in enumerate([works[-1], *works[:-1]]):
            for way in sorted(ways, key=lambda way: (list(ways).index(way) + index) % 3):  # whoever comes later finds prompts in the cache
                seconds[way].append(await ways[way](work))
        seconds = {way: values[1:] for way, values in seconds.items()}  # the first was the warm-up
        plain = seconds["engine"]
        rates = {way: [work.tokens / took for work, took in zip(works, values, strict=False)] for way, values in seconds.items()}
        result["tokens"] = {name: summary(values) for name, values in rates.items()}
        for way in ("direct", "alike"):
            result[f"engine / {way}"] = summary([a / b for a, b in zip(rates["engine"], rates[way], strict=True)])
        print(options.size, {name: round(statistics.median(values)) for name, values in rates.items()}, flush=True)
        weights = load_weights(folder, options)
        dtype = DTYPES[options.dtype]
        publisher = WeightPublisher([(name, dtype, tuple(tensor.shape)) for name, tensor in weights.items()], args, options.device)
        version = 0
        for mode in ("retract", "in_place"):
            parts, longer = [], []
            for index, work in enumerate(works[:-1]):
                task = asyncio.create_task(through(engine, work))
                for share in (0.2, 0.6)[: options.publishes]:
                    await asyncio.sleep(plain[index] * (share if share == 0.2 else 0.3))
                    version += 1
                    parts.append(await publish(engine, publisher, weights, version, stage=options.stage, mode=mode))
                longer.append((await task - plain[index]) / options.publishes)
            columns = {name: summary([row[place] for row in parts[1:] or parts]) for place, name in enumerate(PARTS)}
            result[mode] = columns | {"stall": summary(longer)}
        plan = publisher.plan(version + 1, stage=options.stage)
        result |= {
            "transport": plan.transport,
            "staged": plan.staged,
            "bytes": sum(spec.nbytes for bucket in plan.buckets for spec in bucket),
        }
    finally:
        if publisher is not None:
            publisher.dispose()
        await engine.dispose()
    result["copy_bound"] = copy_seconds(result["bytes"], options.device, 3)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32", help="of the engine, and on the wire")
    parser.add_argument("--trainer-dtype", choices=DTYPES, help="of the trainer's own weights; default: the engine's")
    parser.add_argument("--python", help="interpreter that has sglang; default: this one")
    parser.add_argument("--siblings", type=int, default=8, help="requests that have a prompt in common")
    parser.add_argument("--seeds", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--stage", action=argparse.BooleanOptionalAction, default=True, help="all buckets ready before the pause")
    parser.add_argument("--bucket-mb", type=int, default=256)
    parser.add_argument("--publishes", type=int, choices=[1, 2], default=2, help="in each piece of work")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--folder", help="where the model is written meanwhile; default: a temporary folder")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        make_model(SIZES[options.size], folder, options.dtype, options.device)
        if options.device == "cuda":
            torch.cuda.empty_cache()
        result = asyncio.run(measure(folder, options))
    report(options, result)


def report(options: argparse.Namespace, result: dict[str, Any]) -> None:
    tokens = {name: value["median"] for name, value in result["tokens"].items()}
    ratios = ["{median:.3f} ({least:.3f} to {most:.3f})".format_map(result[f"engine / {way}"]) for way in ("direct", "alike")]
    head = ["size", "start s", "direct tok/s", "with log-probs", "engine tok/s", "engine / direct", "engine / with log-probs"]
    print(table(head, [[options.size, f"{result['start']:.0f}", *(f"{rate:.0f}" for rate in tokens.values()), *ratios]]))
    head = ["size", "GB", "by", "copy bound ms", *(f"{part} ms" for part in PARTS), "stall ms"]
    rows = []
    for mode in ("retract", "in_place"):
        values = [f"{result[mode][part]['median'] * 1000:.1f}" for part in (*PARTS, "stall")]
        rows.append(
            [options.size, f"{result['bytes'] / 1e9:.3f}", f"{result['transport']}, {mode}", f"{result['copy_bound'] * 1000:.1f}", *values]
        )
    print(table(head, rows))
    write(options.json, {"options": vars(options), "machine": machine(options.device)} | result)


if __name__ == "__main__":
    main()
