"""New weights under running requests: pause modes, version spans, caches, checksums, failures."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine
from miles.engines.served_weights import ServedWeights
from miles.types import Completion, FinishReason, GenerateRequest, PauseMode, SamplingParams
from miles.weights.compare import compare_checksums
from miles.weights.sender import WeightPublisher

Start = Callable[..., EmbeddedEngine]
PROMPT = list(range(20, 44))


def ask(request_id: str, prompt: list[int], new: int = 16, affinity: str = "", **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id, prompt, SamplingParams(**({"max_new_tokens": new, "seed": 1, "ignore_eos": True} | sampling)), affinity
    )


class Publisher:
    """The trainer's end, for the models of two checkpoints."""

    def __init__(self, models: list[PreTrainedModel]) -> None:
        self.tables = [dict(model.named_parameters()) for model in models]
        shapes = [(name, torch.float32, tuple(tensor.shape)) for name, tensor in self.tables[0].items()]
        self.publisher = WeightPublisher(shapes, RunConfig(hf_checkpoint="x", name=f"engine-test-{id(self)}", weight_bucket_mb=1))

    async def publish(self, engine: EmbeddedEngine, version: int, which: int, mode: PauseMode | None = "retract") -> None:
        """A whole publish; mode None: the engine is paused already and stays so."""
        if mode is not None:
            await engine.pause(mode)
        plan = self.publisher.plan(version)
        await engine.begin_update(plan, 0)
        for index, bucket in enumerate(plan.buckets):
            self.publisher.send_bucket(index, [(spec.name, self.tables[which][spec.name]) for spec in bucket])
            await engine.receive_bucket(index)
        assert compare_checksums(self.publisher.checksums(), await engine.end_update()).equal
        self.publisher.close()
        if mode is not None:
            await engine.resume()


@pytest.fixture(scope="module")
def models(checkpoint: str, other_checkpoint: str) -> list[PreTrainedModel]:
    return [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in (checkpoint, other_checkpoint)]


@pytest.fixture
def trainer(models: list[PreTrainedModel]) -> Iterator[Publisher]:
    publisher = Publisher(models)
    yield publisher
    publisher.publisher.dispose()


@pytest.fixture
async def engine(start: Start) -> AsyncIterator[EmbeddedEngine]:
    return await start(engine_max_running=6)


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition is another thread's progress
        await asyncio.sleep(0.001)


async def tokens_later(engine: EmbeddedEngine, count: int) -> None:
    now = engine._core.ready.num_sampled
    await until(lambda: engine._core.ready.num_sampled >= now + count)


@torch.no_grad()
def logprobs_under(model: PreTrainedModel, prompt: list[int], completion: Completion) -> np.ndarray:
    logits = model(torch.tensor([prompt + completion.token_ids])).logits[0]
    return logits.log_softmax(-1)[len(prompt) - 1 : -1].gather(-1, torch.tensor(completion.token_ids)[:, None])[:, 0].numpy()


def assert_spans(completion: Completion, versions: range | None = None) -> None:
    spans = completion.version_spans
    assert spans[0].start == 0
    assert spans[-1].end == len(completion.token_ids) == len(completion.logprobs)
    assert all(left.end == right.start and left.version < right.version for left, right in pairwise(spans))


@torch.no_grad()
def logprobs_in_place(models: dict[int, PreTrainedModel], prompt: list[int], completion: Completion) -> np.ndarray:
    """Each span under its own weights, reading the keys and values that the spans before it left."""
    ids, cache, done, found = torch.tensor([prompt + completion.token_ids]), DynamicCache(), 0, []
    for start, end, version in completion.version_spans:
        upto = len(prompt) + end - 1
        logits = models[version](ids[:, done:upto], past_key_values=cache).logits[0, start - end :]
        found.append(logits.log_softmax(-1).gather(-1, ids[0, upto + 1 - (end - start) : upto + 1, None])[:, 0])
        done = upto
    return torch.cat(found).numpy()


@pytest.mark.case("C53")
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_publishes_lose_nothing_and_every_token_is_of_its_spans_weights(
    start: Start, trainer: Publisher, models: list[PreTrainedModel], mode: PauseMode
) -> None:
    engine = await start(engine_max_running=16)
    asked = [ask(f"r{i}", [(7 * i + j) % 500 + 2 for j in range(5 + 2 * (i % 9))], new=60, seed=i) for i in range(16)]
    tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
    of_version = {version: models[which] for version, which in ((0, 0), (1, 1), (2, 0), (5, 1))}
    for version in (1, 2, 5):
        await tokens_later(engine, 200)
        assert (await engine.health()).running == 16
        await trainer.publish(engine, version, int(version != 2), mode)
    for request, answer in zip(asked, await asyncio.gather(*tasks), strict=True):
        assert answer.finish_reason is FinishReason.LENGTH
        assert len(answer.token_ids) == 60
        assert_spans(answer)
        assert [version for _, _, version in answer.version_spans] == [0, 1, 2, 5]
        first = answer.version_spans[0].end
        if mode == "retract":
            fresh = {version: logprobs_under(model, request.input_ids, answer) for version, model in of_version.items()}
            expected = np.concatenate([fresh[version][begin:end] for begin, end, version in answer.version_spans])
            assert (answer.cache_spans, answer.stale_cache_tokens) == ([], 0)
        else:
            expected = logprobs_in_place(of_version, request.input_ids, answer)
            assert (answer.cache_spans, answer.stale_cache_tokens) == ([(first, 60, 0)], 60 - first)
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-4)


@pytest.mark.case("C53")
async def test_in_place_computes_no_prompt_again(engine: EmbeddedEngine, trainer: Publisher) -> None:
    task = asyncio.create_task(engine.generate(ask("r", PROMPT, new=60)))
    await tokens_later(engine, 10)
    prefilled = engine._core.ready.scheduler.num_prefilled
    await trainer.publish(engine, 1, 1, "in_place")
    await task
    assert engine._core.ready.scheduler.num_prefilled == prefilled


async def test_a_cache_that_is_computed_anew_after_it_was_stale_is_stale_no_longer(engine: EmbeddedEngine, trainer: Publisher) -> None:
    task = asyncio.create_task(engine.generate(ask("r", PROMPT, new=60)))
    for version, mode in ((1, "in_place"), (2, "retract"), (3, "in_place")):
        await tokens_later(engine, 10)
        await trainer.publish(engine, version, version % 2, mode)
    answer = await task
    _, one, _, three = answer.version_spans
    assert answer.cache_spans == [(one.start, one.end, 0), (three.start, three.end, 2)]


@pytest.mark.case("C53")
async def test_abort_mode_ends_what_runs_and_keeps_what_waits(engine: EmbeddedEngine, trainer: Publisher) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", PROMPT, new=50, seed=i))) for i in range(10)]
    await tokens_later(engine, 30)
    await trainer.publish(engine, 1, 1, "abort")
    answers = await asyncio.gather(*tasks)
    assert [answer.finish_reason for answer in answers] == [FinishReason.ABORT] * 6 + [FinishReason.LENGTH] * 4
    assert all(answer.token_ids and answer.version_spans == [(0, len(answer.token_ids), 0)] for answer in answers[:6])
    assert all(answer.version_spans == [(0, 50, 1)] for answer in answers[6:])


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_a_pause_samples_nothing_and_new_requests_wait(engine: EmbeddedEngine, mode: PauseMode) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", PROMPT, new=60, seed=i))) for i in range(3)]
    await tokens_later(engine, 9)
    await engine.pause(mode)
    await engine.pause(mode)
    sampled = engine._core.ready.num_sampled
    late = asyncio.create_task(engine.generate(ask("late", PROMPT, seed=9)))
    for _ in range(20):
        health = await engine.health()
        assert (health.healthy, health.paused, health.stuck_seconds) == (True, True, 0)
        assert await engine.abort(["unknown"]) == 0  # comes back from the thread: it had its chance to step
    assert engine._core.ready.num_sampled == sampled
    assert not late.done()
    await engine.resume()
    await engine.resume()
    assert len((await late).token_ids) == 16
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_pause_without_a_publish_changes_nothing(start: Start, mode: PauseMode) -> None:
    engine = await start()
    asked = [ask(f"r{i}", PROMPT[i:], new=40, seed=i) for i in range(5)]
    calm = [await engine.generate(request) for request in asked]
    tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
    for _ in range(3):
        await tokens_later(engine, 20)
        await engine.pause(mode)
        await engine.resume()
    for before, after in zip(calm, await asyncio.gather(*tasks), strict=True):
        assert before.token_ids == after.token_ids
        np.testing.assert_allclose(before.logprobs, after.logprobs, atol=1e-4)


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_no_older_prefix_is_used_after_a_publish(
    engine: EmbeddedEngine, trainer: Publisher, models: list[PreTrainedModel], mode: PauseMode
) -> None:
    running = asyncio.create_task(engine.generate(ask("running", PROMPT, new=90)))
    await tokens_later(engine, 5)
    await trainer.publish(engine, 1, 1, mode)
    sibling = ask("sibling", PROMPT, seed=3, new=10)
    answer = await engine.generate(sibling)
    if mode == "in_place":
        assert answer.cached_tokens == 0
    assert answer.stale_cache_tokens == 0
    assert np.abs(np.array(answer.logprobs) - logprobs_under(models[1], PROMPT, answer)).max() < 1e-4
    await running


async def test_publishing_the_same_weights_changes_no_token(start: Start, trainer: Publisher) -> None:
    engine = await start()
    request = ask("r", PROMPT, new=50)
    calm = await engine.generate(request)
    task = asyncio.create_task(engine.generate(request))
    await tokens_later(engine, 10)
    await trainer.publish(engine, 4, 0)
    assert (await task).token_ids == calm.token_ids


@pytest.mark.case("C85")
async def test_a_publish_that_fails_before_its_first_byte_leaves_the_engine_serving(engine: EmbeddedEngine, trainer: Publisher) -> None:
    await engine.pause("retract")
    plan = trainer.publisher.plan(1)
    await engine.begin_update(plan, 0)
    await engine.abort_update()
    await engine.resume()
    assert (await engine.health()).healthy
    assert (await engine.generate(ask("r", PROMPT))).version_spans == [(0, 16, 0)]


@pytest.mark.case("C85")
@pytest.mark.parametrize("after_end", [False, True])
async def test_a_publish_that_fails_half_way_or_is_found_wrong_stops_serving_until_a_whole_one(
    engine: EmbeddedEngine, trainer: Publisher, after_end: bool
) -> None:
    await engine.pause("retract")
    plan = trainer.publisher.plan(1)
    await engine.begin_update(plan, 0)
    for index, bucket in enumerate(plan.buckets):
        trainer.publisher.send_bucket(index, [(spec.name, trainer.tables[1][spec.name]) for spec in bucket])
        await engine.receive_bucket(index)
    if after_end:
        await engine.end_update()
    await engine.abort_update()
    await engine.resume()
    health = await engine.health()
    assert not health.healthy
    assert "publish" in health.reason
    waiting = asyncio.create_task(engine.generate(ask("r", PROMPT)))
    for _ in range(10):
        assert await engine.abort(["unknown"]) == 0
    assert not waiting.done()
    await trainer.publish(engine, 2, 1)
    assert (await waiting).version_spans == [(0, 16, 2)]
    assert (await engine.health()).healthy


async def test_a_publish_needs_a_pause_and_never_goes_back(engine: EmbeddedEngine, trainer: Publisher) -> None:
    with pytest.raises(RuntimeError, match="paused"):
        await engine.begin_update(trainer.publisher.plan(1), 0)
    await trainer.publish(engine, 3, 1)
    assert (await engine.health()).weight_version == 3
    await engine.pause("retract")
    with pytest.raises(ValueError, match="older"):
        await engine.begin_update(trainer.publisher.plan(2), 0)
    await engine.resume()
    with pytest.raises(ValueError, match="mode"):
        await engine.pause("sleep")


async def test_check_weights(start: Start, trainer: Publisher) -> None:
    engine = await start(check_weight_update_equal=True)
    assert await engine.check_weights("compare") == {}
    sums = await engine.check_weights("checksum")
    assert set(sums) == set(trainer.tables[0])
    await engine.check_weights("reset_tensors")
    assert set(await engine.check_weights("compare")) == set(sums)
    found = await engine.check_weights("compare", skip_list=["embed"])
    assert [name for name, how in found.items() if how.startswith("skipped: ")] == ["model.embed_tokens.weight"]
    assert await engine.check_weights("compare", selector="draft") == {}
    await trainer.publish(engine, 1, 0)
    assert await engine.check_weights("compare", allow_quant_error=True) == {}
    assert await engine.check_weights("checksum") == sums
    await trainer.publish(engine, 2, 1)
    assert "elements differ" in (await engine.check_weights("compare"))["model.norm.weight"]
    for options, message in (({"action": "guess"}, "action"), ({"action": "compare", "selector": "none"}, "selector")):
        with pytest.raises(ValueError, match=message):
            await engine.check_weights(**options)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int8, torch.uint8])
def test_one_unit_in_the_last_place_of_a_quantised_type_may_be_allowed(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 2, 100, 120], dtype=torch.uint8).view(dtype)
    module = torch.nn.Module()
    module.register_parameter("quantised", torch.nn.Parameter(values.clone(), requires_grad=False))
    module.register_parameter("plain", torch.nn.Parameter(torch.ones(3)))
    weights = ServedWeights(dict(module.named_parameters()), 1.0)
    weights.check("snapshot")
    for steps, allowed in ((0, True), (1, True), (2, False)):
        module.quantised.view(torch.uint8).copy_(values.view(torch.uint8) + torch.tensor([0, steps, 0, steps, 0], dtype=torch.uint8))
        assert bool(weights.check("compare")) == (steps > 0)
        assert bool(weights.check("compare", allow_quant_error=True)) != allowed
    module.quantised.copy_(values)
    with torch.no_grad():
        module.plain[0] = torch.nextafter(module.plain[0], torch.tensor(2.0))
    assert set(weights.check("compare", allow_quant_error=True)) == {"plain"}, "what is not quantised is equal or differs"


async def test_compare_needs_a_snapshot(engine: EmbeddedEngine) -> None:
    with pytest.raises(ValueError, match="snapshot"):
        await engine.check_weights("compare")
    await engine.check_weights("snapshot")
    assert await engine.check_weights("compare") == {}


async def test_weights_that_are_not_finite_fail_their_requests_and_leave_no_trace(engine: EmbeddedEngine, trainer: Publisher) -> None:
    clean = await engine.generate(ask("clean", PROMPT, new=30))
    good = dict(trainer.tables[1])
    trainer.tables[1] = good | {"model.norm.weight": torch.full_like(good["model.norm.weight"], float("nan"))}
    poisoned = {name: torch.full_like(tensor, float("nan")) if "k_proj" in name else tensor for name, tensor in good.items()}
    for version, table in ((1, trainer.tables[1]), (2, poisoned)):
        trainer.tables[1] = table
        await trainer.publish(engine, version, 1)
        asked = [ask(f"r{i}", PROMPT, new=30, seed=i) for i in range(8)]
        results = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
        assert {type(result) for result in results} == {FloatingPointError}
        assert "request r3" in str(results[3])
    assert (await engine.health()).healthy
    await trainer.publish(engine, 3, 0)
    assert (await engine.generate(ask("again", PROMPT, new=30))).token_ids == clean.token_ids


async def test_offload_gives_the_cache_back_and_onload_goes_on(start: Start, trainer: Publisher) -> None:
    engine = await start()
    request = ask("r", PROMPT, new=40)
    calm = await engine.generate(request)
    task = asyncio.create_task(engine.generate(request))
    await tokens_later(engine, 10)
    await engine.offload()
    await engine.offload()
    assert engine._core.ready.cache.keys.numel() == 0
    health = await engine.health()
    assert (health.healthy, health.stuck_seconds) == (True, 0)
    with pytest.raises(RuntimeError, match="onload"):
        await trainer.publish(engine, 1, 0)
    await engine.resume()
    await engine.onload()
    await engine.onload()
    assert (await task).token_ids == calm.token_ids


async def test_a_publish_under_a_wave_of_siblings_prefills_their_prompt_once_more(engine: EmbeddedEngine, trainer: Publisher) -> None:
    asked = [replace(ask(f"r{i}", PROMPT, new=30, seed=i)) for i in range(6)]
    tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
    await tokens_later(engine, 60)
    before = engine._core.ready.scheduler.num_prefilled
    await engine.pause("retract")
    written = sum(row.num_written for row in engine._core.ready.scheduler.running)
    await trainer.publish(engine, 1, 1, mode=None)
    await engine.resume()
    await asyncio.gather(*tasks)
    assert engine._core.ready.scheduler.num_prefilled - before <= len(PROMPT) + written
