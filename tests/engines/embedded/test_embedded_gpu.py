"""The engine on a GPU. Run by hand: pytest -m gpu tests/engines"""

import asyncio
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine
from miles.engines.embedded.llama import LlamaForward
from miles.types import Completion, GenerateRequest, SamplingParams, Wave
from miles.weights.sender import WeightPublisher

pytestmark = pytest.mark.gpu


class Bench:
    """An engine on its own loop."""

    def __init__(self, checkpoint: str, **settings: object) -> None:
        defaults = {"hf_checkpoint": checkpoint, "device": "cuda", "engine_max_context": 128, "engine_max_running": 8}
        self.engine = EmbeddedEngine(RunConfig(**(defaults | settings)), "gpu")
        self.loop = asyncio.new_event_loop()
        self.wait(self.engine.init())

    def wait(self, call) -> object:
        return self.loop.run_until_complete(call)

    def answers(self, requests: list[GenerateRequest]) -> list[Completion]:
        async def together() -> list[Completion]:
            return await asyncio.gather(*map(self.engine.generate, requests))

        return self.loop.run_until_complete(together())

    def close(self) -> None:
        self.wait(self.engine.dispose())
        self.loop.close()


def asked(count: int, wave: str = "") -> list[GenerateRequest]:
    return [
        GenerateRequest(
            f"{wave}{i}",
            [(5 * j + i // 4) % 500 + 2 for j in range(3 + 5 * (i // 4))],
            SamplingParams(8 + 2 * i, temperature=0.8, top_p=0.95 if i % 2 else 1.0, seed=i, ignore_eos=True),
            wave=Wave(wave, count, i) if wave else None,
        )
        for i in range(count)
    ]


@torch.no_grad()
def gaps(checkpoint: str, dtype: torch.dtype, requests: list[GenerateRequest], answers: list[Completion]) -> np.ndarray:
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=dtype).cuda().eval()
    found = []
    for request, answer in zip(requests, answers, strict=True):
        ids = torch.tensor([request.input_ids + answer.token_ids], device="cuda")
        logprobs = (model(ids).logits[0].float() / 0.8).log_softmax(-1)[len(request.input_ids) - 1 : -1]
        fresh = logprobs.gather(-1, ids[0, len(request.input_ids) :, None])[:, 0]
        found.append(np.abs(fresh.cpu().numpy() - np.array(answer.logprobs)))
    return np.concatenate(found)


@pytest.fixture
def bench(checkpoint: str) -> Iterator[Bench]:
    made = Bench(checkpoint)
    yield made
    made.close()


def test_logprobs_waves_and_offload(bench: Bench, checkpoint: str) -> None:
    assert isinstance(bench.engine._core.ready.forward, LlamaForward)
    requests = asked(24)
    answers = bench.answers(requests)
    gap = gaps(checkpoint, torch.float32, requests, answers)
    assert gap.mean() < 1e-5
    assert gap.max() < 1e-4

    first, second = bench.answers(asked(24, "a")), bench.answers(asked(24, "b")[::-1])[::-1]
    assert [(answer.token_ids, answer.logprobs) for answer in first] == [(answer.token_ids, answer.logprobs) for answer in second]

    cache, weights = bench.engine._core.ready.cache, bench.engine._core.weights.parameters.values()
    held = sum(tensor.nbytes for tensor in (cache.keys, cache.values, *weights))
    used = torch.cuda.memory_allocated()
    bench.wait(bench.engine.offload())
    assert torch.cuda.memory_allocated() <= used - held  # what is left are workspaces of the libraries
    bench.wait(bench.engine.onload())
    assert [answer.token_ids for answer in bench.answers(requests)] == [answer.token_ids for answer in answers]


def test_a_publish_reaches_the_gpu(bench: Bench, checkpoint: str, other_checkpoint: str) -> None:
    table = dict(AutoModelForCausalLM.from_pretrained(other_checkpoint, dtype=torch.float32).named_parameters())
    args = RunConfig(hf_checkpoint=checkpoint, name="engine-gpu-test", weight_transport="shared_memory")
    publisher = WeightPublisher([(name, torch.float32, tuple(tensor.shape)) for name, tensor in table.items()], args)
    bench.wait(bench.engine.pause("retract"))
    plan = publisher.plan(1)
    bench.wait(bench.engine.begin_update(plan, 0))
    for index, bucket in enumerate(plan.buckets):
        publisher.send_bucket(index, [(spec.name, table[spec.name]) for spec in bucket])
        bench.wait(bench.engine.receive_bucket(index))
    assert bench.wait(bench.engine.end_update()) == publisher.checksums()
    bench.wait(bench.engine.resume())
    publisher.dispose()
    requests = asked(8)
    assert gaps(other_checkpoint, torch.float32, requests, bench.answers(requests)).max() < 1e-4


def test_bfloat16(checkpoint: str) -> None:
    bench = Bench(checkpoint, dtype="bfloat16")
    requests = asked(24)
    assert gaps(checkpoint, torch.bfloat16, requests, bench.answers(requests)).mean() < 0.05
    bench.close()


@torch.inference_mode()
def test_cuda_graphs_change_no_number(checkpoint: str, other_checkpoint: str) -> None:
    """Many sizes of batch and of context, new weights in the same memory, and memory that has moved."""
    benches = [Bench(checkpoint, engine_cuda_graphs=graphs, engine_max_context=512, engine_max_running=24) for graphs in (True, False)]
    with_graphs = benches[0].engine._core.ready.graphs
    assert with_graphs is not None
    assert benches[1].engine._core.ready.graphs is None
    other = dict(AutoModelForCausalLM.from_pretrained(other_checkpoint, dtype=torch.float32).named_parameters())
    requests = [replace(request, sampling=replace(request.sampling, max_new_tokens=20 + 15 * i)) for i, request in enumerate(asked(28))]
    for turn in range(3):
        answers = [bench.answers(requests) for bench in benches]
        assert len(with_graphs._graphs) >= 8
        for graphed, plain in zip(*answers, strict=True):
            assert graphed.token_ids == plain.token_ids
            np.testing.assert_allclose(graphed.logprobs, plain.logprobs, atol=1e-4)
        for bench in benches:
            if turn == 0:
                for name, parameter in bench.engine._core.weights.parameters.items():
                    parameter.copy_(other[name])
            else:
                bench.wait(bench.engine.offload())
                bench.wait(bench.engine.onload())
    for bench in benches:
        bench.close()
