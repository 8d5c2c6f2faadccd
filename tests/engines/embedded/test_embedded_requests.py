"""Ends, refusals, aborts, sharing: one request and its neighbours."""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine
from miles.types import FinishReason, GenerateRequest, SamplingParams, Wave

Start = Callable[..., EmbeddedEngine]
PROMPT = [5, 9, 301, 44, 17, 80]


def ask(request_id: str, prompt: list[int], new: int = 16, affinity: str = "", **sampling: object) -> GenerateRequest:
    return GenerateRequest(
        request_id, prompt, SamplingParams(**({"max_new_tokens": new, "seed": 1, "ignore_eos": True} | sampling)), affinity
    )


async def test_a_stop_token_ends_the_response_and_stays_in_it(start: Start) -> None:
    engine = await start()
    whole = await engine.generate(ask("whole", PROMPT, new=20))
    stop = whole.token_ids[7]
    cut = await engine.generate(ask("cut", PROMPT, new=20, stop_token_ids=(stop, 511)))
    assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
    assert cut.finish_reason is FinishReason.STOP
    assert len(cut.logprobs) == len(cut.token_ids)


async def test_the_models_own_end_token_ends_unless_ignored(start: Start) -> None:
    engine = await start(engine_max_running=32)
    answers = await asyncio.gather(*(engine.generate(ask(f"r{i}", PROMPT, new=100, seed=i, ignore_eos=False)) for i in range(32)))
    ended = [answer for answer in answers if answer.finish_reason is FinishReason.STOP]
    assert ended, "no sample reached the end token"
    assert all(answer.token_ids[-1] == 1 and 1 not in answer.token_ids[:-1] for answer in ended)
    assert all(1 not in answer.token_ids for answer in answers if answer.finish_reason is FinishReason.LENGTH)
    seed = answers.index(ended[0])
    onward = await engine.generate(ask("onward", PROMPT, new=100, seed=seed, ignore_eos=True))
    assert onward.token_ids[: len(ended[0].token_ids)] == ended[0].token_ids
    assert len(onward.token_ids) == 100


async def test_a_stop_string_across_tokens_ends_the_response(start: Start) -> None:
    engine = await start()
    tokenizer = engine._core.ready.stopping.tokenizer
    whole = await engine.generate(ask("whole", PROMPT, new=40))
    for first in range(0, 36, 5):
        text = tokenizer.decode(whole.token_ids[first : first + 3])
        if "\ufffd" in text or not text:
            continue
        cut = await engine.generate(ask(f"cut{first}", PROMPT, new=40, stop=(text, "never to be seen")))
        assert cut.finish_reason is FinishReason.STOP
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert text in tokenizer.decode(cut.token_ids)
        assert text not in tokenizer.decode(cut.token_ids[:-1])


async def test_a_response_ends_where_the_context_does(start: Start) -> None:
    engine = await start(engine_max_context=32)
    answer = await engine.generate(ask("r", PROMPT, new=1000))
    assert len(answer.token_ids) == 32 - len(PROMPT)
    assert answer.finish_reason is FinishReason.LENGTH


BAD = {
    "empty": ({"input_ids": []}, {}, "empty"),
    "unknown token": ({"input_ids": [3, 512]}, {}, "512 at place 1"),
    "negative token": ({"input_ids": [-1]}, {}, "-1 at place 0"),
    "no number": ({"input_ids": [3, None]}, {}, "None"),
    "over-long": ({"input_ids": [3] * 128}, {}, "128 input tokens"),
    "temperature": ({}, {"temperature": -0.1}, "temperature"),
    "temperature NaN": ({}, {"temperature": float("nan")}, "temperature"),
    "top_p 0": ({}, {"top_p": 0.0}, "top_p"),
    "top_p 1.2": ({}, {"top_p": 1.2}, "top_p"),
    "top_k": ({}, {"top_k": -1}, "top_k"),
    "min_p": ({}, {"min_p": 1.5}, "min_p"),
    "no tokens": ({}, {"max_new_tokens": 0}, "max_new_tokens"),
    "empty stop": ({}, {"stop": ("",)}, "stop string"),
}


@pytest.mark.case("C57")
async def test_bad_requests_are_refused_by_name_and_harm_no_other(start: Start) -> None:
    engine = await start()
    good = ask("good", PROMPT, new=60)
    alone = await engine.generate(good)
    running = asyncio.create_task(engine.generate(good))
    for name, (fields, sampling, message) in BAD.items():
        bad = ask(name, PROMPT)
        bad = replace(bad, sampling=replace(bad.sampling, **sampling), **fields)
        with pytest.raises(ValueError, match=rf"request {name}: .*{message}"):
            await engine.generate(bad)
    assert (await running).token_ids == alone.token_ids
    assert (await engine.health()).healthy


async def test_a_request_id_runs_once_at_a_time(start: Start) -> None:
    engine = await start()
    first = asyncio.create_task(engine.generate(ask("r", PROMPT, new=60)))
    await asyncio.sleep(0)
    with pytest.raises(ValueError, match=r"request r: .*already"):
        await engine.generate(ask("r", PROMPT))
    assert len((await first).token_ids) == 60
    assert len((await engine.generate(ask("r", PROMPT))).token_ids) == 16


async def test_siblings_are_prefilled_once(start: Start, reference: PreTrainedModel) -> None:
    engine = await start(engine_max_running=16)
    prompt = list(range(10, 60))
    answers = await asyncio.gather(*(engine.generate(ask(f"s{i}", list(prompt), seed=i)) for i in range(12)))
    assert engine._core.ready.scheduler.num_prefilled == 50
    assert [answer.cached_tokens for answer in answers] == [0] + [49] * 11
    assert len({tuple(answer.token_ids) for answer in answers}) > 6


async def test_a_late_sibling_copies_from_one_that_still_runs(start: Start) -> None:
    engine = await start()
    prompt = list(range(10, 60))
    early = asyncio.create_task(engine.generate(ask("early", prompt, new=70)))
    await until(lambda: engine._core.ready.num_sampled >= 3)
    late = await engine.generate(ask("late", prompt, seed=5, new=5))
    assert late.cached_tokens == 49
    await early
    alone = await engine.generate(ask("alone", prompt, seed=5, new=5))
    assert alone.cached_tokens == 0
    assert alone.token_ids == late.token_ids


async def test_a_longer_prompt_of_one_affinity_copies_what_it_shares(start: Start) -> None:
    engine = await start()
    prompt = list(range(10, 50))
    turns = [ask("first", prompt, affinity="session", new=60), ask("second", [*prompt[:30], 7, 8, 9], affinity="session")]
    _, second = await asyncio.gather(*map(engine.generate, turns))
    assert second.cached_tokens == 30
    strangers = [ask("third", prompt, affinity="a", new=60), ask("fourth", [*prompt[:30], 7, 8, 9], affinity="b")]
    _, fourth = await asyncio.gather(*map(engine.generate, strangers))
    assert fourth.cached_tokens == 0
    assert fourth.token_ids == second.token_ids


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - the condition is another thread's progress
        await asyncio.sleep(0.001)


async def test_abort_keeps_the_partial_tokens(start: Start) -> None:
    engine = await start(engine_max_running=4)
    names = [f"r{i}" for i in range(8)]
    whole = await asyncio.gather(*(engine.generate(ask(name, PROMPT, new=100, seed=i)) for i, name in enumerate(names)))
    done = engine._core.ready.num_sampled
    tasks = [asyncio.create_task(engine.generate(ask(name, PROMPT, new=100, seed=i))) for i, name in enumerate(names)]
    await until(lambda: engine._core.ready.num_sampled >= done + 20)
    assert await engine.abort(["r1", "r7", "unknown"]) == 2
    assert await engine.abort(["r1"]) == 0
    answers = await asyncio.gather(*tasks)
    for i, (answer, full) in enumerate(zip(answers, whole, strict=True)):
        assert answer.finish_reason is (FinishReason.ABORT if i in (1, 7) else FinishReason.LENGTH)
        assert answer.token_ids == full.token_ids[: len(answer.token_ids)]
    assert 0 < len(answers[1].token_ids) < 100
    assert answers[7].token_ids == []
    assert answers[7].version_spans == []


async def test_abort_of_everything_and_a_caller_that_goes_away_free_their_slots(start: Start) -> None:
    engine = await start(engine_max_running=4)
    tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", PROMPT, new=100, seed=i))) for i in range(8)]
    await until(lambda: engine._core.ready.num_sampled >= 8)
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert await engine.abort() == 7
    assert {answer.finish_reason for answer in await asyncio.gather(*tasks[1:])} == {FinishReason.ABORT}
    health = await engine.health()
    assert (health.running, health.waiting) == (0, 0)
    assert len((await engine.generate(ask("r0", PROMPT))).token_ids) == 16


async def test_a_step_that_raises_fails_every_request_and_shows_in_health(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await start(engine_max_running=2)
    tasks = [asyncio.create_task(engine.generate(ask(f"r{i}", PROMPT, new=100, seed=i))) for i in range(5)]
    wave = replace(ask("w", PROMPT), wave=Wave("never complete", 2, 0))
    tasks.append(asyncio.create_task(engine.generate(wave)))
    await until(lambda: engine._core.ready.num_sampled >= 4)

    def broken(*_: object) -> None:
        raise MemoryError("no room for activations")

    monkeypatch.setattr(engine._core.ready, "_compute", broken)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert {type(result) for result in results} == {MemoryError}
    with pytest.raises(MemoryError, match="no room"):
        await engine.generate(ask("later", PROMPT))
    health = await engine.health()
    assert not health.healthy
    assert "no room for activations" in health.reason
    assert (health.running, health.waiting) == (0, 0)


async def test_health_answers_while_the_engine_computes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await start()
    inside, go = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()
    compute = engine._core.ready._compute

    def slow(plan: object) -> object:
        loop.call_soon_threadsafe(inside.set)
        go.wait(60)
        return compute(plan)

    monkeypatch.setattr(engine._core.ready, "_compute", slow)
    task = asyncio.create_task(engine.generate(ask("r", PROMPT, new=1)))
    await inside.wait()
    health = await engine.health()
    assert (health.healthy, health.running, health.waiting) == (True, 1, 0)
    first = health.stuck_seconds
    assert (await engine.health()).stuck_seconds >= first >= 0
    go.set()
    await task
    while (await engine.health()).stuck_seconds:
        await engine.abort(["unknown"])  # comes back from the thread that made the last step


async def test_a_missing_or_foreign_checkpoint_is_a_clear_error(start: Start, tmp_path) -> None:
    for checkpoint, message in (("", "--hf-checkpoint"), (str(tmp_path), "config.json"), (str(tmp_path / "gone"), "gone")):
        with pytest.raises(ValueError, match=message):
            await start(hf_checkpoint=checkpoint)


async def test_a_disposed_engine_ends_what_it_had_and_refuses_more(start: Start) -> None:
    engine = await start()
    task = asyncio.create_task(engine.generate(ask("r", PROMPT, new=100)))
    await until(lambda: engine._core.ready.num_sampled >= 2)
    await engine.dispose()
    await engine.dispose()
    assert (await task).finish_reason is FinishReason.ABORT
    with pytest.raises(RuntimeError, match="disposed"):
        await engine.generate(ask("s", PROMPT))
    assert not (await engine.health()).healthy


async def test_an_id_used_again_right_after_its_caller_went_away_gets_its_own_answer(start: Start) -> None:
    engine = await start()
    expected = await engine.generate(ask("r", PROMPT, new=3, seed=7))
    for _ in range(10):
        gone = asyncio.create_task(engine.generate(ask("r", PROMPT, new=4, seed=2)))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        assert (await engine.generate(ask("r", PROMPT, new=3, seed=7))).token_ids == expected.token_ids


async def test_a_cache_that_breaks_fails_every_request_and_hangs_none(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = await start(engine_max_running=4)

    def broken(*_: object) -> None:
        raise RuntimeError("device lost")

    monkeypatch.setattr(engine._core.ready.cache, "copy", broken)
    asked = [ask(f"r{i}", PROMPT[i:], new=3 + 5 * i) for i in range(5)]
    results = await asyncio.gather(*map(engine.generate, asked), return_exceptions=True)
    assert {str(result) for result in results} == {"device lost"}
    assert "device lost" in (await engine.health()).reason
    await engine.dispose()


async def test_an_engine_that_is_not_ready_says_so(checkpoint: str) -> None:
    engine = EmbeddedEngine(RunConfig(hf_checkpoint=checkpoint), "unborn")
    assert (await engine.health()).reason == "not loaded"
    for call in (engine.generate(ask("r", PROMPT)), engine.pause("retract")):
        with pytest.raises(RuntimeError, match=r"init\(\) comes first"):
            await call
    await engine.dispose()
