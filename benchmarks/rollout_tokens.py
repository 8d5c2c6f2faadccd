"""Rollout speed: generated tokens per second of the embedded engine, of `model.generate` and of transformers' continuous batching.

    python benchmarks/rollout_tokens.py --size tiny --threads 1 --json tokens.json

All three sample the same number of tokens for the same prompts with the same random model at temperature 1. Only tokens that were asked
for count: a padded batch goes on until its longest response is done, and what it computes for the shorter ones is waste.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, PreTrainedModel, Qwen3Config

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine
from miles.types import GenerateRequest, SamplingParams


@dataclass(frozen=True)
class Size:
    """A Qwen3 shape, random weights."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    requests: int = 64
    mean_length: int = 34
    longest: int = 128


SIZES = {
    "ci": Size(2, 64, 4, 2, 16, 128, 512, requests=16, mean_length=8, longest=24),
    "tiny": Size(4, 128, 4, 2, 32, 256, 4096),
    "tiny-49k": Size(4, 128, 4, 2, 32, 256, 49152),
    "135m": Size(30, 576, 9, 3, 64, 1536, 49152),
    "0.6b": Size(28, 1024, 16, 8, 128, 3072, 151936, requests=256, mean_length=256, longest=1024),
    "1.7b": Size(28, 2048, 16, 8, 128, 6144, 151936, requests=256, mean_length=256, longest=1024),
    "4b": Size(36, 2560, 32, 8, 128, 9728, 151936, requests=256, mean_length=256, longest=1024),
}


@dataclass(frozen=True)
class Work:
    """Prompts and how many tokens each is answered with."""

    prompts: list[list[int]]
    lengths: list[int]

    @classmethod
    def draw(cls, size: Size, siblings: int, seed: int) -> Work:
        """Response lengths are geometric, cut at the longest: most are short, a few are long, as in practice."""
        draw = np.random.default_rng(seed)
        prompts = [draw.integers(2, size.vocabulary, int(draw.integers(16, 80))).tolist() for _ in range(size.requests // siblings)]
        lengths = np.minimum(draw.geometric(1 / size.mean_length, size.requests), size.longest)
        return cls([prompts[i // siblings] for i in range(size.requests)], lengths.tolist())

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def context(self) -> int:
        return max(map(len, self.prompts)) + max(self.lengths)


def make_model(size: Size, folder: str) -> None:
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=size.vocabulary,
        hidden_size=size.hidden,
        intermediate_size=size.intermediate,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.kv_heads,
        head_dim=size.head_dim,
        tie_word_embeddings=True,
        eos_token_id=1,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


class Rate(NamedTuple):
    """Tokens per second by the clock, and per second of this process's CPU time, which a busy machine disturbs less."""

    wall: float
    cpu: float


def timed(run: Callable[[], int], expected: int, repeats: int, device: str) -> list[Rate]:
    """The rate of each repeat, after one to warm up."""
    rates = []
    for repeat in range(repeats + 1):
        begin, begin_cpu = time.perf_counter(), time.process_time()
        made = run()
        if device == "cuda":
            torch.cuda.synchronize()
        if repeat:
            rates.append(Rate(expected / (time.perf_counter() - begin), expected / (time.process_time() - begin_cpu)))
        assert made == expected, f"{made} tokens instead of {expected}"
    return rates


def with_engine(folder: str, work: Work, options: argparse.Namespace) -> list[Rate]:
    args = RunConfig(
        hf_checkpoint=folder,
        device=options.device,
        dtype=options.dtype,
        engine_threads=options.threads,
        engine_max_running=len(work.prompts),
        engine_max_context=-(-work.context // 64) * 64,
    )
    engine = EmbeddedEngine(args, "benchmark")
    loop = asyncio.new_event_loop()
    loop.run_until_complete(engine.init())

    async def all_of_them() -> int:
        asked = [
            GenerateRequest(f"r{i}", prompt, SamplingParams(length, seed=i, ignore_eos=True))
            for i, (prompt, length) in enumerate(zip(work.prompts, work.lengths, strict=True))
        ]
        return sum(len(answer.token_ids) for answer in await asyncio.gather(*map(engine.generate, asked)))

    try:
        return timed(lambda: loop.run_until_complete(all_of_them()), work.tokens, options.repeats, options.device)
    finally:
        loop.run_until_complete(engine.dispose())
        loop.close()


def load(folder: str, options: argparse.Namespace) -> PreTrainedModel:
    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}[options.dtype]
    return AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="sdpa").to(options.device).eval()


def with_generate(folder: str, work: Work, options: argparse.Namespace) -> list[Rate]:
    """One padded batch, left-padded as transformers asks for, until the longest response is done."""
    model = load(folder, options)
    longest = max(map(len, work.prompts))
    ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in work.prompts], device=options.device)
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in work.prompts], device=options.device)
    settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max(work.lengths), pad_token_id=0)

    def run() -> int:
        out = model.generate(ids, attention_mask=mask, generation_config=settings)
        assert out.shape[1] == longest + max(work.lengths)
        return work.tokens

    with torch.inference_mode():
        return timed(run, work.tokens, options.repeats, options.device)


def with_continuous_batching(folder: str, work: Work, options: argparse.Namespace) -> list[Rate]:
    model = load(folder, options)
    settings = GenerationConfig(do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max(work.lengths), eos_token_id=-1, pad_token_id=0)
    limits = ContinuousBatchingConfig(max_memory_percent=0.1) if options.device == "cpu" else ContinuousBatchingConfig()
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
        return timed(run, work.tokens, options.repeats, options.device)
    finally:
        manager.stop(block=True, timeout=30)


WAYS: dict[str, Callable[[str, Work, argparse.Namespace], list[Rate]]] = {
    "embedded engine": with_engine,
    "model.generate, padded": with_generate,
    "transformers continuous batching": with_continuous_batching,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="ci")
    parser.add_argument("--siblings", type=int, default=1, help="requests that share one prompt")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=WAYS, action="append", help="measure only this one (may be repeated)")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    size = SIZES[options.size]
    work = Work.draw(size, options.siblings, options.seed)
    with tempfile.TemporaryDirectory() as folder:
        make_model(size, folder)
        rates = {name: way(folder, work, options) for name, way in WAYS.items() if name in (options.only or WAYS)}
    report(size, work, options, rates)


def report(size: Size, work: Work, options: argparse.Namespace, rates: dict[str, list[Rate]]) -> None:
    medians = {name: Rate(*map(statistics.median, zip(*values, strict=True))) for name, values in rates.items()}
    result: dict[str, Any] = {
        "size": options.size,
        "shape": asdict(size),
        "siblings": options.siblings,
        "device": torch.cuda.get_device_name() if options.device == "cuda" else platform.machine(),
        "dtype": options.dtype,
        "threads": options.threads,
        "requests": len(work.prompts),
        "tokens": work.tokens,
        "context": work.context,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tokens_per_second": {
            name: {"median": medians[name]._asdict(), "all": [value._asdict() for value in values]} for name, values in rates.items()
        },
    }
    first = next(iter(medians.values()))
    print(f"{options.size}, {len(work.prompts)} requests of {work.tokens} new tokens, {options.siblings} a prompt, {options.device}")
    print(f"  {'':34} {'tokens/s':>12} {'':>8} {'tokens/CPU s':>16}")
    for name, rate in medians.items():
        print(f"  {name:34} {rate.wall:12.0f} {first.wall / rate.wall:7.2f}x {rate.cpu:16.0f} {first.cpu / rate.cpu:7.2f}x")
    if options.json:
        with open(options.json, "w") as file:
            json.dump(result, file, indent=1)


if __name__ == "__main__":
    main()
