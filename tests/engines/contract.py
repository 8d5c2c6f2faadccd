"""What the contract tests of all engines share: requests, a trainer's end of a publish, and numbers to compare with."""

import asyncio
import os
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import psutil
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from miles.config.run_config import RunConfig
from miles.engines.sglang.engine import SGLangEngine
from miles.protocols import Engine
from miles.types import Completion, FinishReason, GenerateRequest, PauseMode, SamplingParams
from miles.weights.compare import Comparison, compare_checksums
from miles.weights.sender import WeightPublisher

ROOT = Path(__file__).parents[2]
SERVER_PYTHON = os.environ.get("MILES_SGLANG_PYTHON", str(ROOT / ".venv-sglang" / "bin" / "python"))
"""Made by scripts/sglang-cpu."""
PROMPT = list(range(20, 44))
LIMIT = 60.0


def ask(request_id: str, prompt: list[int] = PROMPT, new: int = 16, affinity: str = "", **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id, prompt, SamplingParams(**({"max_new_tokens": new, "seed": 1, "ignore_eos": True} | sampling)), affinity
    )


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(LIMIT):
        while not await condition():  # noqa: ASYNC110 - the condition is another thread's or process's progress
            await asyncio.sleep(0.005)


async def all_running(engine: Engine, count: int) -> None:
    async def running() -> bool:
        return (await engine.health()).running >= count

    await until(running)


async def all_waiting(engine: Engine, count: int) -> None:
    async def waiting() -> bool:
        return (await engine.health()).waiting >= count

    await until(waiting)


async def some_steps(engine: Engine, name: str, steps: int = 4) -> None:
    """Whatever else runs has made about as many steps."""
    await engine.generate(ask(f"steps-{name}.", [300, 301], new=steps))


@torch.no_grad()
def logprobs_under(model: PreTrainedModel, prompt: list[int], completion: Completion, temperature: float = 1.0) -> np.ndarray:
    """float64 [tokens]: of a fresh forward pass."""
    ids = torch.tensor(completion.token_ids)
    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0].double() / temperature
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, ids[:, None])[:, 0].numpy()


def gap(model: PreTrainedModel, prompt: list[int], completion: Completion, temperature: float = 1.0) -> float:
    return float(np.abs(np.array(completion.logprobs) - logprobs_under(model, prompt, completion, temperature)).max())


def assert_whole(completion: Completion) -> None:
    """Tokens pair with log-probs, and spans cover them in order."""
    spans = completion.version_spans
    assert len(completion.token_ids) == len(completion.logprobs)
    assert [spans[0].start, spans[-1].end] == [0, len(completion.token_ids)]
    assert all(left.end == right.start and left.version < right.version for left, right in pairwise(spans))


class Trainer:
    """The trainer's end, for the weights of several models of one shape. Versions count up over a whole module."""

    def __init__(self, engine: Engine, models: list[PreTrainedModel]) -> None:
        self.engine, self.models = engine, models
        self.tables = [dict(model.named_parameters()) for model in models]
        shapes = [(name, torch.float32, tuple(tensor.shape)) for name, tensor in self.tables[0].items()]
        args = RunConfig(hf_checkpoint="x", name=f"contract-{os.getpid()}", weight_bucket_mb=1)
        self.sender = WeightPublisher(shapes, args)
        self.version = 0
        self.which: dict[int, int] = {0: 0}  # version -> model

    def model(self, version: int) -> PreTrainedModel:
        return self.models[self.which[version]]

    async def send(self, which: int) -> Comparison:
        """Everything between a pause and a resume."""
        plan = self.sender.plan(self.version + 1)
        await self.engine.begin_update(plan, 0)
        for index, bucket in enumerate(plan.buckets):
            self.sender.send_bucket(index, [(spec.name, self.tables[which][spec.name].detach()) for spec in bucket])
            await self.engine.receive_bucket(index)
        found = compare_checksums(self.sender.checksums(), await self.engine.end_update())
        self.sender.close()
        self.version += 1
        self.which[self.version] = which
        return found

    async def publish(self, which: int, mode: PauseMode = "retract") -> int:
        await self.engine.pause(mode)
        assert (await self.send(which)).equal
        await self.engine.resume()
        return self.version

    def dispose(self) -> None:
        self.sender.dispose()


def load(folder: str) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def reasons(answers: list[Completion]) -> list[FinishReason]:
    return [answer.finish_reason for answer in answers]


def leavings(engine: Engine) -> Callable[[], None]:
    """Called when the engine is ready; what it returns is called after dispose: no process, file or shared memory of a server stays."""
    server = engine._server if isinstance(engine, SGLangEngine) else None
    family = psutil.Process(server.pid).children(recursive=True) if server else []
    files = [server._scratch, *server._mapped()] if server else []
    assert all(path.exists() for path in files)

    def check() -> None:
        assert [path for path in files if path.exists()] == []
        assert [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE] == []

    return check
