"""Rollout speed: generated tokens per second of the embedded engine, of `model.generate` and of transformers' continuous batching.

    python benchmarks/rollout_tokens.py --size tiny --threads 1 --json tokens.json

All three sample the same number of tokens for the same prompts with the same random model at temperature 1. Only tokens that were asked
for count: a padded batch goes on until its longest response is done, and what it computes for the shorter ones is waste.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import asdict, replace
from typing import NamedTuple

import torch
import transformers
from report import machine, summary, table, write
from shapes import DTYPES, SIZES, Size, Work, make_model
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine
from miles.types import GenerateRequest, SamplingParams


class Rate(NamedTuple):
    """Tokens per second by the clock, and per second of this process's CPU time, which a busy machine disturbs less."""

    wall: float
    cpu: float


Run = Callable[[], int]
"""Answers all requests once, and returns how many new tokens there are."""


def timed(run: Run, expected: int, device: str) -> Rate:
    begin, begin_cpu = time.perf_counter(), time.process_time()
    made = run()
    if device == "cuda":
        torch.cuda.synchronize()
    rate = Rate(expected / (time.perf_counter() - begin), expected / (time.process_time() - begin_cpu))
    assert made == expected, f"{made} tokens instead of {expected}"
    return rate


@contextmanager
def with_engine(folder: str, work: Work, options: argparse.Namespace, graphs: bool = True) -> Iterator[Run]:
    args = RunConfig(
        hf_checkpoint=folder,
        device=options.device,
        dtype=options.dtype,
        engine_threads=options.threads,
        engine_max_running=len(work.prompts),
        engine_max_context=-(-work.context // 64) * 64,
        engine_cuda_graphs=graphs,
    )
    engine = EmbeddedEngine(args, "benchmark")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.init())

    async def all_of_them() -> int:
        asked = [
            GenerateRequest(f"r{i}.", prompt, SamplingParams(length, seed=i, ignore_eos=True))
            for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        return sum(len(answer.token_ids) for answer in await asyncio.gather(*map(engine.generate, asked)))

    try:
        yield lambda: loop.run_until_complete(all_of_them())
    finally:
        loop.run_until_complete(engine.dispose())
        loop.close()


def with_engine_without_graphs(folder: str, work: Work, options: argparse.Namespace) -> AbstractContextManager[Run]:
    return with_engine(folder, work, options, graphs=False)


def load(folder: str, options: argparse.Namespace) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES[options.dtype], attn_implementation="sdpa").to(options.device).eval()


@contextmanager
def with_generate(folder: str, work: Work, options: argparse.Namespace) -> Iterator[Run]:
    """One padded batch, left-padded as transformers asks for, until the longest response is done."""
    model = load(folder, options)
    longest = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in work.prompts], device=options.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts], device=options.device)
    settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max(work.lengths), pad_token_id=0)

    @torch.inference_mode()
    def run() -> int:
        out = model.generate(ids, attention_mask=mask, generation_config=settings)
        assert out.shape[1] == longest + max(work.lengths)
        return work.tokens

    yield run


@contextmanager
def with_continuous_batching(folder: str, work: Work, options: argparse.Namespace) -> Iterator[Run]:
    model = load(folder, options)
    settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max(work.lengths), eos_token_id=-1, pad_token_id=0)
    limits = ContinuousBatchingConfig(max_memory_percent=0.1 if options.device == "cpu" else 0.3)
    manager = model.init_continuous_batching(generation_config=settings, continuous_batching_config=limits)
    manager.start()

    def run() -> int:
        for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True)):
            manager.add_request(prompt, request_id=f"{time.perf_counter_ns()}-{i}", max_new_tokens=length, eos_token_id=-1)
        made, left = 0, len(work.prompts)
        while left:
            result = manager.get_result(timeout=600)
            if result is not None and result.is_finished():
                made, left = made + len(result.generated_tokens), left - 1
        return made

    try:
        yield run
    finally:
        manager.stop(block=True, timeout=30)


WAYS: dict[str, Callable[[str, Work, argparse.Namespace], AbstractContextManager[Run]]] = {
    "embedded engine": with_engine,
    "embedded engine without CUDA graphs": with_engine_without_graphs,
    "model.generate, padded": with_generate,
    "transformers continuous batching": with_continuous_batching,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--siblings", type=int, default=1, help="requests that share one prompt")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--requests", type=int, help="default: as many as suit the size")
    parser.add_argument("--longest", type=int, help="tokens of the longest response; default: what suits the size")
    parser.add_argument("--only", choices=WAYS, action="append", help="measure only this one (may be repeated)")
    parser.add_argument("--folder", help="where the model is written meanwhile; default: a temporary folder")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    size = SIZES[options.size]
    size = replace(size, requests=options.requests or size.requests, longest=options.longest or size.longest)
    work = Work.draw(size, options.siblings, options.seed)
    wanted = options.only or [name for name in WAYS if options.device == "cuda" or "CUDA" not in name]
    with tempfile.TemporaryDirectory(dir=options.folder) as folder, ExitStack() as stack:
        make_model(size, folder, options.dtype, options.device)
        runs = {name: stack.enter_context(WAYS[name](folder, work, options)) for name in wanted}
        rates = alternated(runs, work, options)
    report(size, work, options, rates)


def alternated(runs: dict[str, Run], work: Work, options: argparse.Namespace) -> dict[str, list[Rate]]:
    """The rates of every repeat, after one to warm up; every other time in the opposite order."""
    rates: dict[str, list[Rate]] = {name: [] for name in runs}
    for repeat in range(options.repeats + 1):
        for name in list(runs)[:: 1 if repeat % 2 else -1]:
            rate = timed(runs[name], work.tokens, options.device)
            print(f"{name}: {rate.wall:.0f} tokens/s{'' if repeat else ', warming up'}", flush=True)
            if repeat:
                rates[name].append(rate)
    return rates


def report(size: Size, work: Work, options: argparse.Namespace, rates: dict[str, list[Rate]]) -> None:
    wall = {name: summary([rate.wall for rate in values]) for name, values in rates.items()}
    cpu = {name: summary([rate.cpu for rate in values]) for name, values in rates.items()}
    facts = {"requests": len(work.prompts), "tokens": work.tokens, "context": work.context, "shape": asdict(size)}
    first = next(iter(rates))
    rows = [
        [
            name,
            f"{wall[name]['median']:.0f}",
            f"{wall[name]['least']:.0f} to {wall[name]['most']:.0f}",
            f"{wall[first]['median'] / wall[name]['median']:.2f}",
            f"{cpu[first]['median'] / cpu[name]['median']:.2f}",
        ]
        for name in rates
    ]
    print(f"{options.size}, {len(work.prompts)} requests of {work.tokens} new tokens, {options.siblings} a prompt, {options.device}")
    print(table(["", "tokens/s", "spread", f"{first} is faster by", "by CPU time"], rows))
    write(
        options.json,
        {"options": vars(options), "machine": machine(options.device)} | facts | {"tokens_per_second": wall, "tokens_per_cpu_second": cpu},
    )


if __name__ == "__main__":
    main()
