"""What every engine does alike: the embedded one, and a real SGLang server on a CPU."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import numpy as np
import psutil
import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from miles.config.run_config import RunConfig
from miles.engines.embedded.engine import EmbeddedEngine
from miles.engines.sglang.engine import SGLangEngine
from miles.protocols import Engine
from miles.rollout.carried import joined
from miles.rollout.teacher import Teacher
from miles.types import Completion, FinishReason, PauseMode, Sample
from tests.engines.contract import (
    PROMPT,
    SERVER_PYTHON,
    Trainer,
    all_running,
    all_waiting,
    ask,
    assert_whole,
    gap,
    leavings,
    load,
    logprobs_under,
    reasons,
    some_steps,
    until,
)

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def models(checkpoint: str, other_checkpoint: str) -> list[PreTrainedModel]:
    """As it was loaded, with other weights, and one that tests may train."""
    return [load(checkpoint), load(other_checkpoint), load(checkpoint)]


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["embedded", "sglang"])
async def engine(request: pytest.FixtureRequest, checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Engine]:
    """One for all tests: a server takes a while to start."""
    args = RunConfig(
        hf_checkpoint=checkpoint,
        engine=request.param,
        device="cpu",
        engine_max_running=20,
        engine_max_context=384,
        engine_start_timeout=500,
        check_weight_update_equal=True,
        run_root=str(tmp_path_factory.mktemp("runs")),
        sglang_python=SERVER_PYTHON if request.param == "sglang" else None,
    )
    kinds: dict[str, type[EmbeddedEngine] | type[SGLangEngine]] = {"embedded": EmbeddedEngine, "sglang": SGLangEngine}
    made = kinds[request.param](args, "engine-0")
    try:
        await made.init()
        nothing_left = leavings(made)
        yield made
    finally:
        await made.dispose()
    nothing_left()


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def trainer(engine: Engine, models: list[PreTrainedModel]) -> AsyncIterator[Trainer]:
    made = Trainer(engine, models)
    yield made
    made.dispose()


# ---- the checkpoint's own weights: these tests come first


async def test_a_checkpoint_is_served_as_version_0(engine: Engine) -> None:
    answer = await engine.generate(ask("first."))
    assert answer.version_spans == [(0, 16, 0)]
    health = await engine.health()
    assert (health.healthy, health.weight_version, health.running, health.waiting, health.paused) == (True, 0, 0, 0, False)
    assert health.stuck_seconds < 1


async def test_what_was_loaded_is_what_the_snapshot_holds(engine: Engine, trainer: Trainer) -> None:
    assert await engine.check_weights("compare") == {}
    sums = await engine.check_weights("checksum")
    assert set(sums) == set(trainer.tables[0])


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 0.6}, {"temperature": 0.0}, {"top_p": 0.7, "temperature": 1.3}, {"top_k": 5}, {"top_k": 2**40}, {"min_p": 0.1}],
    ids=str,
)
async def test_logprobs_are_those_of_a_fresh_forward_pass(engine: Engine, models: list[PreTrainedModel], sampling: dict) -> None:
    asked = [ask(f"l{i}.{len(str(sampling))}.", PROMPT[: 3 + 4 * i], new=40, seed=i, **sampling) for i in range(5)]
    for request, answer in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        assert len(answer.token_ids) == 40
        assert_whole(answer)
        assert gap(models[0], request.input_ids, answer, sampling.get("temperature", 1.0) or 1.0) < 2e-5


@pytest.mark.parametrize("temperature", [1.0, 0.6])
async def test_the_likeliest_tokens_are_those_of_a_fresh_forward_pass(
    engine: Engine, models: list[PreTrainedModel], temperature: float
) -> None:
    asked = [
        ask(f"k{i}.{temperature}.", PROMPT[: 5 + i], new=20, seed=i, num_likeliest=6 * (i % 2), temperature=temperature) for i in range(4)
    ]
    for request, answer in zip(asked, await asyncio.gather(*map(engine.generate, asked)), strict=True):
        if not request.sampling.num_likeliest:
            assert answer.likeliest is None
            continue
        assert answer.likeliest is not None
        with torch.no_grad():
            logits = models[0](torch.tensor([request.input_ids + answer.token_ids])).logits[0, len(request.input_ids) - 1 : -1]
        fresh = (logits.double() / temperature).log_softmax(-1)
        values, _ = fresh.topk(6, -1)
        assert answer.likeliest.logprobs.shape == (20, 6)
        np.testing.assert_allclose(answer.likeliest.logprobs, values, atol=2e-5)
        np.testing.assert_allclose(fresh.gather(-1, torch.tensor(answer.likeliest.ids, dtype=torch.long)), values, atol=2e-5)


async def test_greedy_takes_the_likeliest(engine: Engine, models: list[PreTrainedModel]) -> None:
    answer = await engine.generate(ask("greedy.", new=20, temperature=0.0))
    with torch.no_grad():
        logits = models[0](torch.tensor([PROMPT + answer.token_ids])).logits[0]
    assert logits.argmax(-1)[len(PROMPT) - 1 : -1].tolist() == answer.token_ids


async def test_a_seed_gives_the_same_tokens_alone_and_in_company(engine: Engine) -> None:
    alone = [await engine.generate(ask(f"alone{seed}.", new=30, seed=seed)) for seed in (1, 2, 2**63 - 1)]
    company = await asyncio.gather(
        *(engine.generate(ask(f"together{seed}.", new=30, seed=seed)) for seed in (1, 2, 2**63 - 1)),
        *(engine.generate(ask(f"other{i}.", PROMPT[i:], new=9 + i, seed=i, top_p=0.9)) for i in range(8)),
    )
    assert [answer.token_ids for answer in alone] == [answer.token_ids for answer in company[:3]]
    assert len({tuple(answer.token_ids) for answer in alone}) == 3


async def test_samples_follow_the_distribution(engine: Engine, models: list[PreTrainedModel]) -> None:
    with torch.no_grad():
        expected = models[0](torch.tensor([PROMPT])).logits[0, -1].double().softmax(-1).numpy()
    answers = await asyncio.gather(*(engine.generate(ask(f"d{i}.", new=1, seed=i)) for i in range(300)))
    counts = np.bincount([answer.token_ids[0] for answer in answers], minlength=len(expected))
    likely = expected > 0.02
    deviation = np.abs(counts[likely] / 300 - expected[likely]) / np.sqrt(expected[likely] * (1 - expected[likely]) / 300)
    assert deviation.max() < 4.5


@pytest.mark.case("C33")
async def test_a_stop_token_ends_the_response_and_stays_in_it(engine: Engine) -> None:
    whole = await engine.generate(ask("whole.", new=20))
    stop = whole.token_ids[7]
    for ignore in (True, False):
        cut = await engine.generate(ask(f"cut{ignore}.", new=20, stop_token_ids=(stop, 511), ignore_eos=ignore))
        assert cut.token_ids == whole.token_ids[: whole.token_ids.index(stop) + 1]
        assert cut.finish_reason is FinishReason.STOP
        assert_whole(cut)


@pytest.mark.case("C33")
async def test_the_models_own_end_token_ends_unless_ignored(engine: Engine) -> None:
    answers = await asyncio.gather(*(engine.generate(ask(f"e{i}.", new=60, seed=i, ignore_eos=False)) for i in range(32)))
    ended = [answer for answer in answers if answer.finish_reason is FinishReason.STOP]
    assert ended, "no sample reached the end token"
    assert all(answer.token_ids[-1] == 1 and 1 not in answer.token_ids[:-1] for answer in ended)
    assert all(1 not in answer.token_ids for answer in answers if answer.finish_reason is FinishReason.LENGTH)
    onward = await engine.generate(ask("onward.", new=60, seed=answers.index(ended[0]), ignore_eos=True))
    assert onward.token_ids[: len(ended[0].token_ids)] == ended[0].token_ids
    assert len(onward.token_ids) == 60


async def test_a_stop_string_across_tokens_ends_the_response(engine: Engine, models: list[PreTrainedModel], tokenizer) -> None:
    whole = await engine.generate(ask("text.", new=40))
    tried = 0
    for first in range(0, 36, 5):
        text = tokenizer.decode(whole.token_ids[first : first + 3])
        if "\ufffd" in text or not text:
            continue
        tried += 1
        cut = await engine.generate(ask(f"text{first}.", new=40, stop=(text, "never to be seen")))
        assert cut.finish_reason is FinishReason.STOP
        assert cut.token_ids == whole.token_ids[: len(cut.token_ids)]
        assert text in tokenizer.decode(cut.token_ids)
        assert text not in tokenizer.decode(cut.token_ids[:-1])
    assert tried > 1


async def test_a_response_ends_where_the_context_does(engine: Engine) -> None:
    answer = await engine.generate(ask("long.", new=1000))
    assert len(answer.token_ids) == 384 - len(PROMPT)
    assert answer.finish_reason is FinishReason.LENGTH


BAD = {
    "empty": ({"input_ids": []}, {}, "empty"),
    "unknown token": ({"input_ids": [3, 512]}, {}, "512 at place 1"),
    "negative token": ({"input_ids": [-1]}, {}, "-1 at place 0"),
    "no number": ({"input_ids": [3, None]}, {}, "None"),
    "over-long": ({"input_ids": [3] * 384}, {}, "384 input tokens"),
    "temperature": ({}, {"temperature": -0.1}, "temperature"),
    "top_p": ({}, {"top_p": 0.0}, "top_p"),
    "top_k": ({}, {"top_k": -1}, "top_k"),
    "min_p": ({}, {"min_p": 1.5}, "min_p"),
    "likeliest": ({}, {"num_likeliest": 513}, "num_likeliest 513"),
    "no tokens": ({}, {"max_new_tokens": 0}, "max_new_tokens"),
    "empty stop": ({}, {"stop": ("",)}, "stop string"),
}


@pytest.mark.case("C57")
async def test_bad_requests_are_refused_by_name_and_harm_no_other(engine: Engine) -> None:
    good = ask("good.", new=200)
    alone = await engine.generate(good)
    running = asyncio.create_task(engine.generate(good))
    await all_running(engine, 1)
    with pytest.raises(ValueError, match=r"request good\.: .*already"):
        await engine.generate(good)
    for name, (fields, sampling, message) in BAD.items():
        bad = ask(name)
        bad = replace(bad, sampling=replace(bad.sampling, **sampling), **fields)
        with pytest.raises(ValueError, match=rf"request {name}: .*{message}"):
            await engine.generate(bad)
    assert (await running).token_ids == alone.token_ids
    assert (await engine.health()).healthy


async def test_abort_keeps_the_partial_tokens(engine: Engine) -> None:
    names = [f"r{i}." for i in range(4)]
    whole = await asyncio.gather(*(engine.generate(ask(name, new=100, seed=i)) for i, name in enumerate(names)))
    counted = await engine.health()
    tasks = [asyncio.create_task(engine.generate(ask(name, new=100, seed=i))) for i, name in enumerate(names)]
    await all_running(engine, 4)
    await some_steps(engine, "abort")
    assert await engine.abort(["r1.", "unknown"]) == 1
    assert await engine.abort(["r1.", "unknown"]) == 0
    answers = await asyncio.gather(*tasks)
    for i, (answer, full) in enumerate(zip(answers, whole, strict=True)):
        assert answer.finish_reason is (FinishReason.ABORT if i == 1 else FinishReason.LENGTH)
        assert answer.token_ids == full.token_ids[: len(answer.token_ids)]
        assert_whole(answer)
    assert 0 < len(answers[1].token_ids) < 100
    health = await engine.health()
    assert health.tokens_cut - counted.tokens_cut == len(answers[1].token_ids)
    assert health.tokens - counted.tokens >= sum(len(answer.token_ids) for answer in answers)


async def test_an_answer_that_was_cut_off_goes_on_after_a_publish(engine: Engine, trainer: Trainer) -> None:
    """Its log-probs are those of the weights that wrote each token, given the whole of what stands before it."""
    base = await trainer.publish(0)
    started = asyncio.create_task(engine.generate(ask("cut.", new=60)))
    await all_running(engine, 1)
    await some_steps(engine, "cut")
    await engine.abort(["cut."])
    first = await started
    written = len(first.token_ids)
    assert 0 < written < 60
    version = await trainer.publish(1)
    whole = joined(first, await engine.generate(ask("rest.", PROMPT + first.token_ids, new=60 - written, seed=1)))
    assert (len(whole.token_ids), whole.finish_reason) == (60, FinishReason.LENGTH)
    assert whole.version_spans == [(0, written, base), (written, 60, version)]
    assert_whole(whole)
    for begin, end, wrote in whole.version_spans:
        fresh = logprobs_under(trainer.model(wrote), PROMPT, whole)
        assert np.abs(np.array(whole.logprobs[begin:end]) - fresh[begin:end]).max() < 1e-4


async def test_abort_of_everything_and_a_caller_that_goes_away(engine: Engine) -> None:
    tasks = [asyncio.create_task(engine.generate(ask(f"a{i}.", new=300, seed=i))) for i in range(8)]
    await all_running(engine, 8)
    tasks[0].cancel()
    with pytest.raises(asyncio.CancelledError):
        await tasks[0]
    assert await engine.abort() == 7
    assert set(reasons(await asyncio.gather(*tasks[1:]))) == {FinishReason.ABORT}
    health = await engine.health()
    assert (health.running, health.waiting) == (0, 0)
    assert len((await engine.generate(ask("a0."))).token_ids) == 16


async def test_siblings_share_a_prefix(engine: Engine) -> None:
    prompt = list(range(100, 150))
    await engine.generate(ask("elder.", prompt, new=2, affinity="group"))
    early = asyncio.create_task(engine.generate(ask("middle.", prompt, new=150, affinity="group")))
    await all_running(engine, 1)
    await some_steps(engine, "siblings", 2)
    younger = await engine.generate(ask("younger.", prompt, new=2, affinity="group"))
    assert younger.cached_tokens >= 48
    await early


# ---- publishes


@pytest.mark.case("C53")
@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_a_publish_loses_nothing_and_every_token_has_its_version(engine: Engine, trainer: Trainer, mode: PauseMode) -> None:
    base = await trainer.publish(0)
    asked = [ask(f"p{mode}{i}.", PROMPT[: 5 + i], new=100, seed=i) for i in range(16)]
    tasks = [asyncio.create_task(engine.generate(request)) for request in asked]
    await all_running(engine, 16)
    await some_steps(engine, f"{mode}1")
    await trainer.publish(1, mode)
    await some_steps(engine, f"{mode}2")
    await trainer.publish(0, mode)
    answers = await asyncio.gather(*tasks)
    assert reasons(answers) == [FinishReason.LENGTH] * 16
    assert {span.version for answer in answers for span in answer.version_spans} == {base, base + 1, base + 2}
    for request, answer in zip(asked, answers, strict=True):
        assert len(answer.token_ids) == 100
        assert_whole(answer)
        fresh = [logprobs_under(model, request.input_ids, answer) for model in trainer.models[:2]]
        exact = answer.version_spans if mode == "retract" else answer.version_spans[:1]
        for begin, end, version in exact:
            assert np.abs(np.array(answer.logprobs[begin:end]) - fresh[trainer.which[version]][begin:end]).max() < 1e-4
        if mode == "in_place":
            assert answer.stale_cache_tokens == 100 - answer.version_spans[1].start
            assert answer.cache_spans[0].version == base
        else:
            assert answer.stale_cache_tokens == 0


@pytest.mark.case("C53")
async def test_abort_mode_ends_what_runs_and_keeps_what_waits(engine: Engine, trainer: Trainer) -> None:
    base = trainer.version
    tasks = [asyncio.create_task(engine.generate(ask(f"q{i}.", new=100, seed=i))) for i in range(16)]
    await all_running(engine, 16)
    await some_steps(engine, "abort-mode")
    tasks += [asyncio.create_task(engine.generate(ask(f"q{i}.", new=100, seed=i))) for i in range(16, 24)]
    version = await trainer.publish(1, "abort")
    answers = await asyncio.gather(*tasks)
    assert reasons(answers[:16]) == [FinishReason.ABORT] * 16
    assert all(answer.token_ids and answer.version_spans == [(0, len(answer.token_ids), base)] for answer in answers[:16])
    waited = [answer for answer in answers if answer.finish_reason is FinishReason.LENGTH]
    assert len(waited) >= 4
    assert all(answer.version_spans == [(0, 100, version)] for answer in waited)


@pytest.mark.parametrize("mode", ["retract", "in_place", "abort"])
async def test_requests_wait_while_it_is_paused(engine: Engine, mode: PauseMode) -> None:
    await engine.pause(mode)
    await engine.pause(mode)
    late = asyncio.create_task(engine.generate(ask("late.", seed=9)))
    await all_waiting(engine, 1)
    for _ in range(10):
        health = await engine.health()
        assert (health.healthy, health.paused, health.stuck_seconds) == (True, True, 0)
    assert not late.done()
    assert await engine.abort(["late."]) == 1
    assert (await late).finish_reason is FinishReason.ABORT
    later = asyncio.create_task(engine.generate(ask("later.", seed=9)))
    await engine.resume()
    await engine.resume()
    assert len((await later).token_ids) == 16


async def test_publishing_the_same_weights_changes_no_token(engine: Engine, trainer: Trainer) -> None:
    await trainer.publish(0)
    calm = await engine.generate(ask("calm.", new=100))
    task = asyncio.create_task(engine.generate(ask("same.", new=100)))
    await all_running(engine, 1)
    await some_steps(engine, "same")
    await trainer.publish(0)
    assert (await task).token_ids == calm.token_ids


@pytest.mark.parametrize("mode", ["retract", "in_place"])
async def test_no_older_prefix_is_used_after_a_publish(engine: Engine, trainer: Trainer, mode: PauseMode) -> None:
    await trainer.publish(0)
    running = asyncio.create_task(engine.generate(ask(f"old{mode}.", new=100)))
    await all_running(engine, 1)
    await some_steps(engine, f"old{mode}")
    version = await trainer.publish(1, mode)
    answer = await engine.generate(ask(f"new{mode}.", seed=3, new=10))
    assert answer.version_spans == [(0, 10, version)]
    assert answer.stale_cache_tokens == 0
    assert gap(trainer.models[1], PROMPT, answer) < 1e-4
    await running


async def test_a_stop_string_that_a_publish_cuts_in_two_still_ends_the_response(engine: Engine, trainer: Trainer, tokenizer) -> None:
    await trainer.publish(0)
    whole = await engine.generate(ask("uncut.", new=80))
    begun = tokenizer.decode(whole.token_ids[:50])
    texts = [tokenizer.decode(whole.token_ids[place : place + 8]) for place in range(50, 72)]
    text = next(text for text in texts if "\ufffd" not in text and text not in begun)
    task = asyncio.create_task(engine.generate(ask("cut-in-two.", new=80, stop=(text,))))
    while not task.done():
        await engine.pause("retract")
        await engine.resume()
        await asyncio.sleep(0.01)
    answer = await task
    assert answer.finish_reason is FinishReason.STOP
    assert answer.token_ids == whole.token_ids[: len(answer.token_ids)]
    assert text in tokenizer.decode(answer.token_ids)
    assert text not in tokenizer.decode(answer.token_ids[:-1])


async def test_a_tensor_that_arrives_wrong_is_named_and_nothing_is_served_until_a_whole_publish(engine: Engine, trainer: Trainer) -> None:
    name = "model.layers.1.self_attn.k_proj.weight"
    await engine.pause("retract")
    plan = trainer.sender.plan(trainer.version + 1)
    await engine.begin_update(plan, 0)
    for index, bucket in enumerate(plan.buckets):
        trainer.sender.send_bucket(index, [(spec.name, trainer.tables[1][spec.name].detach()) for spec in bucket])
        for spec in bucket:
            if spec.name == name:
                trainer.sender._sender.buffer(index)[spec.offset + 3] ^= 1
        await engine.receive_bucket(index)
    received, sent = await engine.end_update(), trainer.sender.checksums()
    assert [key for key in sent if received[key] != sent[key]] == [name]
    trainer.sender.close()
    await engine.abort_update()
    await engine.resume()
    health = await engine.health()
    assert not health.healthy
    assert "publish" in health.reason
    waiting = asyncio.create_task(engine.generate(ask("waiting.")))
    for _ in range(5):
        assert await engine.abort(["unknown"]) == 0
    assert not waiting.done()
    trainer.version += 1
    version = await trainer.publish(1)
    assert (await waiting).version_spans == [(0, 16, version)]
    assert (await engine.health()).healthy


@pytest.mark.case("C85")
async def test_a_publish_that_fails_before_its_first_byte_leaves_the_engine_serving(engine: Engine, trainer: Trainer) -> None:
    version = await trainer.publish(0)
    await engine.pause("retract")
    await engine.begin_update(trainer.sender.plan(version + 1), 0)
    await engine.abort_update()
    await engine.resume()
    assert (await engine.health()).healthy
    assert (await engine.generate(ask("still."))).version_spans == [(0, 16, version)]


@pytest.mark.case("C85")
async def test_a_publish_that_fails_half_way_serves_nothing(engine: Engine, trainer: Trainer) -> None:
    await engine.pause("retract")
    plan = trainer.sender.plan(trainer.version + 1)
    await engine.begin_update(plan, 0)
    trainer.sender.send_bucket(0, [(spec.name, trainer.tables[1][spec.name].detach()) for spec in plan.buckets[0]])
    await engine.receive_bucket(0)
    await engine.abort_update()
    trainer.sender.close()
    await engine.resume()
    assert not (await engine.health()).healthy
    waiting = asyncio.create_task(engine.generate(ask("half.")))
    version = await trainer.publish(0)
    assert (await waiting).version_spans == [(0, 16, version)]


async def test_a_publish_that_cannot_work_is_refused_before_a_byte_moves(engine: Engine, trainer: Trainer) -> None:
    plan = trainer.sender.plan(trainer.version + 1)
    with pytest.raises(RuntimeError, match="paused"):
        await engine.begin_update(plan, 0)
    await engine.pause("retract")
    with pytest.raises(ValueError, match="older"):
        await engine.begin_update(replace(plan, version=trainer.version - 1), 0)
    first = plan.buckets[0][0]
    wrong = replace(plan, buckets=((replace(first, name="model.no_such.weight"), *plan.buckets[0][1:]), *plan.buckets[1:]))
    with pytest.raises(ValueError, match=r"no_such.* is unknown.*" + first.name.replace(".", r"\.") + " is not sent"):
        await engine.begin_update(wrong, 0)
    await engine.abort_update()
    await engine.resume()
    with pytest.raises(ValueError, match="mode"):
        await engine.pause("sleep")
    assert (await engine.health()).healthy


async def test_a_staged_publish_begins_before_the_pause_and_is_taken_in_it(engine: Engine, trainer: Trainer) -> None:
    old = await trainer.publish(0)
    running = asyncio.create_task(engine.generate(ask("staged.", new=80)))
    plan = trainer.sender.plan(old + 1, stage=True)
    assert plan.staged
    for index, bucket in enumerate(plan.buckets):
        trainer.sender.send_bucket(index, [(spec.name, trainer.tables[1][spec.name].detach()) for spec in bucket])
    await engine.begin_update(plan, 0)
    with pytest.raises(RuntimeError, match="paused"):
        await engine.end_update()
    assert (await engine.generate(ask("before."))).version_spans == [(0, 16, old)]
    await engine.pause("retract")
    assert await engine.end_update() == trainer.sender.checksums()
    await engine.resume()
    trainer.sender.close()
    trainer.version, trainer.which[old + 1] = old + 1, 1
    assert_whole(await running)
    answer = await engine.generate(ask("after."))
    assert answer.version_spans == [(0, 16, old + 1)]
    assert gap(trainer.model(old + 1), PROMPT, answer) < 1e-4


async def test_check_weights_finds_what_a_publish_left_out(engine: Engine, trainer: Trainer) -> None:
    await trainer.publish(0)
    await engine.check_weights("snapshot")
    before = await engine.check_weights("checksum")
    await engine.check_weights("reset_tensors")
    differing = await engine.check_weights("compare", skip_list=["embed_tokens"])
    assert set(differing) == set(trainer.tables[0])
    assert differing["model.embed_tokens.weight"].startswith("skipped: ")
    assert "elements differ" in differing["model.layers.0.mlp.up_proj.weight"]
    await trainer.publish(0)
    assert await engine.check_weights("compare") == {}
    assert await engine.check_weights("checksum") == before
    assert await engine.check_weights("checksum", selector="draft") == {}
    with pytest.raises(ValueError, match="action"):
        await engine.check_weights("guess")


@pytest.mark.case("C59")
async def test_after_an_optimizer_step_engine_and_trainer_agree(engine: Engine, trainer: Trainer) -> None:
    model = trainer.models[2]
    assert model.config.tie_word_embeddings
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    gaps = []
    for step in range(2):
        await trainer.publish(2)
        answer = await engine.generate(ask(f"step{step}.", new=40, seed=step))
        gaps.append(gap(model, PROMPT, answer))
        ids = torch.tensor([PROMPT + answer.token_ids])
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert max(gaps) < 2e-5, gaps


async def test_offload_holds_requests_until_onload(engine: Engine) -> None:
    await engine.offload()
    await engine.offload()
    waiting = asyncio.create_task(engine.generate(ask("offloaded.")))
    for _ in range(5):
        assert (await engine.health()).healthy
    assert not waiting.done()
    await engine.onload()
    assert len((await waiting).token_ids) == 16


@pytest.mark.case("C81")
async def test_a_scheduler_that_hangs_is_found_though_its_server_answers(engine: Engine) -> None:
    if not isinstance(engine, SGLangEngine):
        return  # its scheduler and its health are one process
    assert engine._server is not None
    family = psutil.Process(engine._server.pid).children(recursive=True)
    scheduler = next(process for process in family if "scheduler" in " ".join(process.cmdline()))
    task = asyncio.create_task(engine.generate(ask("held-up.", new=200)))
    await all_running(engine, 1)
    await some_steps(engine, "held-up")
    scheduler.suspend()
    try:

        async def stuck() -> bool:
            health = await engine.health()
            return health.healthy and health.stuck_seconds > 1.0

        await until(stuck)
    finally:
        scheduler.resume()
    assert len((await task).token_ids) == 200
    assert (await engine.health()).stuck_seconds == 0


async def test_a_server_is_a_teacher(engine: Engine, trainer: Trainer, tokenizer) -> None:
    """Log-probs of given tokens are those of a fresh forward pass, whatever the server has cached by then."""
    if not isinstance(engine, SGLangEngine):
        return  # only a server can be asked from elsewhere
    assert engine._server is not None
    version = await trainer.publish(0)
    teacher = Teacher([engine._server.url], tokenizer, 60)
    try:
        await teacher.check()
        rng = np.random.default_rng(0)
        samples = [Sample(i, 0, "", PROMPT[: 1 + i], response_ids=rng.integers(3, 500, 1 + 6 * i).tolist()) for i in range(12)]
        samples += [replace(one) for one in samples]  # the second time from the cache
        await asyncio.gather(*map(teacher.score, samples))
    finally:
        await teacher.dispose()
    model = trainer.model(version)
    for one in samples:
        answer = Completion("", one.response_ids, one.teacher_logprobs or [], FinishReason.STOP, [])
        assert len(answer.logprobs) == len(answer.token_ids)
        assert gap(model, one.prompt_ids, answer) < 2e-5


async def test_an_engine_attaches_to_a_server_and_leaves_it_running(engine: Engine, trainer: Trainer) -> None:
    if not isinstance(engine, SGLangEngine):
        return  # only a server can be attached to
    assert engine._server is not None
    args = engine.args.model_copy(update={"sglang_python": None})
    longer = SGLangEngine(args.model_copy(update={"engine_max_context": 450}), "longer", url=engine._server.url)
    with pytest.raises(ValueError, match="a context of 400 tokens, less than --engine-max-context 450"):
        await longer.init()
    await longer.dispose()
    attached = SGLangEngine(args, "attached", url=engine._server.url)
    await attached.init()
    end = Trainer(attached, trainer.models)
    version = await end.publish(1)
    answer = await attached.generate(ask("attached."))
    assert answer.version_spans == [(0, 16, version)]
    assert gap(trainer.models[1], PROMPT, answer) < 1e-4
    await attached.pause("retract")
    await attached.dispose()
    end.dispose()
    engine._server.check()
    assert len((await engine.generate(ask("still-there."))).token_ids) == 16


async def test_a_disposed_engine_ends_what_it_had_and_refuses_more(engine: Engine) -> None:
    """The last test: the engine is gone after it."""
    task = asyncio.create_task(engine.generate(ask("last.", new=300)))
    await all_running(engine, 1)
    await some_steps(engine, "last")
    await engine.dispose()
    await engine.dispose()
    assert (await task).finish_reason is FinishReason.ABORT
    with pytest.raises(RuntimeError, match="disposed"):
        await engine.generate(ask("more."))
    assert not (await engine.health()).healthy
