"""Answers that take long: nobody waits for them under `keep`, and what is written of them is never thrown away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from miles.rollout.carried import Carried, hand_over
from miles.rollout.generate import EngineCall, EngineFailed
from miles.rollout.rollout_executor import RolloutExecutor
from miles.tracking.ledger import balance, read
from miles.types import Completion, GenerateRequest, RolloutData, RolloutDataRef, SamplingParams, VersionSpan
from tests.rollout import plugs
from tests.rollout.scripted_engine import EOS, ScriptedEngine, complete
from tests.rollout.small_run import MakeArgs, Start, publish, until

STRAGGLER = "t-g0."


def columns(executor: RolloutExecutor, ref: RolloutDataRef) -> RolloutData:
    data: RolloutData = executor.store.get(ref.shares[0]).data
    return data


def four_tokens(request: GenerateRequest) -> Completion:
    return complete(request, [301, 302, 303, EOS])


class InParts(ScriptedEngine):
    """Writes a token under each version that a held request sees, and one more; an abort hands over what is there."""

    async def generate(self, request: GenerateRequest) -> Completion:
        started = self.version
        completion = await super().generate(request)
        count = len(completion.token_ids)
        spans = [VersionSpan(i, i + 1, min(started + i, self.version)) for i in range(count)]
        completion.version_spans = spans
        return completion


class Watched(ScriptedEngine):
    """Tells when a request arrives."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.arrived = asyncio.Event()

    async def generate(self, request: GenerateRequest) -> Completion:
        self.arrived.set()
        return await super().generate(request)

    async def asked(self, prefix: str) -> None:
        async with asyncio.timeout(60):
            while not any(request.request_id.startswith(prefix) for request in self.requests):
                self.arrived.clear()
                await self.arrived.wait()


async def train(executor: RolloutExecutor, engine: ScriptedEngine, rollout_id: int, *, held: str) -> RolloutDataRef:
    """One rollout and its publish, in which everything is answered but `held`."""
    pending = asyncio.ensure_future(executor.get(rollout_id))

    def released() -> bool:
        for request_id in [name for name in engine.held if not name.startswith(held)]:
            engine.release(request_id)
        return pending.done()

    await until(released)
    ref = await pending
    await executor.note_trained(rollout_id, rollout_id + 1)
    await publish(executor, rollout_id + 2, engine)
    return ref


async def test_under_keep_nobody_waits_for_a_straggler_and_its_old_tokens_are_not_trained(make_args: MakeArgs, start: Start) -> None:
    engine = InParts(four_tokens, hold=True)
    args = make_args(fully_async=True, max_weight_staleness=1, staleness_policy="keep", max_concurrent_groups=50, num_rollout=8)
    executor = await start(args, engine)
    for rollout_id in range(3):
        ref = await train(executor, engine, rollout_id, held=STRAGGLER)
        assert 0 not in ref.group_indices
        assert ref.metrics["rollout/weight_lag_max"] <= 1
    engine.release(STRAGGLER)  # its tokens are of versions 1, 2, 3 and 4; now is 4
    ref = await train(executor, engine, 3, held="nobody")
    assert 0 in ref.group_indices
    assert ref.metrics["rollout/weight_lag_max"] == 1, "the bound holds for every trained token"
    assert ref.metrics["rollout/tokens_too_old"] == 4, "two of each of two siblings"
    data = columns(executor, ref)
    place = int(np.flatnonzero(data.group_indices == 0)[0])
    end = data.offsets[place + 1]
    assert data.token_ids[end - 4 : end].tolist() == [301, 302, 303, EOS], "the answer is whole"
    assert data.loss_mask[end - 4 : end].tolist() == [0, 0, 1, 1]
    assert data.weight_versions[end - 4 : end].tolist() == [-1, -1, 3, 4]
    lines = list(read(Path(args.run_dir) / "ledger.jsonl"))
    assert [(line["lag"], line["tokens"], line["version"]) for line in lines if line["event"] == "trimmed"] == [(3, 4, 3)]
    assert balance(lines).holds


async def test_under_keep_a_group_without_a_fresh_token_is_started_again(make_args: MakeArgs, start: Start) -> None:
    engine = ScriptedEngine(hold=True)  # one token of the version at the start, the rest of that at the end
    args = make_args(fully_async=True, max_weight_staleness=1, staleness_policy="keep", max_concurrent_groups=4, buffer_factor=5)
    executor = await start(args, engine)
    pending = asyncio.ensure_future(executor.get(0))
    await until(lambda: len(engine.held) == 8)
    engine.release_all()
    await pending
    await publish(executor, 9, engine)
    pending = asyncio.ensure_future(executor.get(1))
    await until(lambda: any(request.request_id.startswith("t-g2.") and request.sampling.seed for request in engine.requests[8:]))
    await until(lambda: bool(engine.release_all()) or pending.done())
    ref = await asyncio.wait_for(pending, 5)
    assert ref.group_indices == [2, 3]
    assert ref.metrics["rollout/groups_stale"] == 2
    assert ref.metrics["rollout/weight_lag_max"] == 0


async def test_keep_holds_across_a_resume(make_args: MakeArgs, start: Start, tmp_path: Path) -> None:
    """A straggler that is done when the save is made, and too old when it is trained by the resumed run."""
    engine = InParts(four_tokens, hold=True)
    args = make_args(fully_async=True, max_weight_staleness=1, staleness_policy="keep", max_concurrent_groups=50, buffer_factor=9)
    executor = await start(args, engine)
    for rollout_id in range(2):
        await train(executor, engine, rollout_id, held=STRAGGLER)
    engine.release(STRAGGLER)
    await until(lambda: executor.ledger.books.stage[0] == "finished")
    await executor.save(1, str(tmp_path))
    await executor.dispose()
    again = InParts(four_tokens)
    resumed = await start(args, again, version=3, load=(1, tmp_path))
    ref = await resumed.get(2)
    assert 0 in ref.group_indices
    assert ref.metrics["rollout/weight_lag_max"] <= 1
    assert ref.metrics["rollout/tokens_too_old"] == 2, "one of each of two siblings"


async def test_only_the_newest_versions_tokens_are_trained_where_that_is_asked_for(make_args: MakeArgs, start: Start) -> None:
    engine = InParts(four_tokens, hold=True)
    executor = await start(make_args(fully_async=True, mask_offpolicy_in_partial_rollout=True, max_concurrent_groups=50), engine)
    for rollout_id in range(2):
        await train(executor, engine, rollout_id, held=STRAGGLER)
    ref = await train(executor, engine, 2, held="nobody")
    data = columns(executor, ref)
    place = int(np.flatnonzero(data.group_indices == 0)[0])
    end = data.offsets[place + 1]
    assert data.loss_mask[end - 4 : end].tolist() == [0, 0, 1, 1], "of versions 1, 2, 3 and 3"
    assert data.weight_versions[end - 4 : end].tolist() == [-1, -1, 3, 3]


async def test_a_sample_whose_time_is_over_goes_on_from_where_it_was(make_args: MakeArgs, start: Start) -> None:
    """Its tokens stay, and so does a sibling that is done: it is neither asked nor scored again."""
    engine = Watched(four_tokens, hold=True)
    more = {"reward": "tests.rollout.plugs.counted", "score_centering": 2}
    args = make_args(fully_async=True, num_rollout=1, rollout_batch_size=1, sample_timeout=0.2, **more)
    plugs.scored.clear()
    executor = await start(args, engine)
    pending = asyncio.ensure_future(executor.get(0))
    await until(lambda: len(engine.held) == 2)
    engine.release("t-g0.0.1.")
    await engine.asked("t-g0.1.")
    (rest,) = [request for request in engine.requests if request.request_id.startswith("t-g0.1.")]
    first = next(request for request in engine.requests if request.request_id.startswith("t-g0.0.0."))
    assert rest.request_id.startswith("t-g0.1.0.")
    assert rest.input_ids == [*first.input_ids, 300], "what the abort handed over"
    assert rest.sampling.max_new_tokens == first.sampling.max_new_tokens - 1
    assert rest.sampling.seed != first.sampling.seed
    engine.version = 5
    await until(lambda: bool(engine.release_all()))
    ref = await asyncio.wait_for(pending, 5)
    assert ref.metrics["rollout/groups_retried"] == 1
    assert ref.metrics["rollout/tokens_carried"] == 1 + 4
    data = columns(executor, ref)
    first_end = int(data.offsets[1])
    assert data.token_ids[first_end - 5 : first_end].tolist() == [300, 301, 302, 303, EOS]
    assert data.rollout_logprobs[first_end - 5 : first_end].tolist() == [-0.5] * 5
    assert data.likeliest.ids[first_end - 5 : first_end].tolist() == [[token, token + 1] for token in (300, 301, 302, 303, EOS)]
    assert data.weight_versions[first_end - 5 : first_end].tolist() == [1, 0, 0, 0, 0]
    lines = list(read(Path(args.run_dir) / "ledger.jsonl"))
    assert sorted(plugs.scored) == [0, 1]
    assert [(line["reason"], line["kept"]) for line in lines if line["event"] == "retried"] == [("timeout", 5)]


def engine_call(engine: ScriptedEngine, carried: Carried, attempt: int, **sampling: Any) -> EngineCall:
    drawn = SamplingParams(max_new_tokens=50, **sampling)
    return EngineCall(f"t-g0.{attempt}.0", 0, drawn, (1, 0, 0, attempt), 100, engine.generate, carried=carried)


async def cut_after(engine: ScriptedEngine, call: EngineCall, ids: list[int], turn: int) -> None:
    """A turn that is cut off when one token is there."""
    engine.hold = True
    asked = asyncio.ensure_future(call(ids, turn=turn))
    await until(lambda: bool(engine.held))
    await hand_over(engine, [call.carried])
    assert call.carried.asking == ""
    with pytest.raises(EngineFailed, match="aborted after"):
        await asked
    engine.hold = False


async def test_turns_that_were_answered_are_not_asked_again() -> None:
    engine, carried = ScriptedEngine(four_tokens), Carried()
    first = engine_call(engine, carried, 0)
    turn0 = await first([5, 6])
    await cut_after(engine, first, [5, 6, *turn0.token_ids, 9], turn=1)
    assert carried.tokens == 4 + 1

    second = engine_call(engine, carried, 1)
    again = await second([5, 6])
    assert (again.token_ids, again.logprobs) == (turn0.token_ids, turn0.logprobs)
    again.token_ids.append(7)  # whoever gets it may change it
    turn1 = await second([5, 6, *turn0.token_ids, 9], turn=1)
    assert turn1.token_ids == [300, 301, 302, 303, EOS]
    assert turn1.version_spans == [(0, 1, 0), (1, 5, 0)]
    assert [request.request_id for request in engine.requests] == ["t-g0.0.0.0.", "t-g0.0.0.1.", "t-g0.1.0.1."]
    assert engine.requests[-1].input_ids == [5, 6, 301, 302, 303, EOS, 9, 300]

    third = engine_call(engine, carried, 2)
    assert (await third([5, 6])).token_ids == turn0.token_ids
    await third([5, 6, *turn0.token_ids, 8], turn=1)
    assert engine.requests[-1].input_ids == [5, 6, 301, 302, 303, EOS, 8], "another question, as the tool answered otherwise"


async def test_where_stop_strings_end_answers_an_unfinished_turn_begins_anew() -> None:
    engine, carried = ScriptedEngine(four_tokens), Carried()
    await cut_after(engine, engine_call(engine, carried, 0, stop=("end",)), [5, 6], turn=0)
    assert carried.tokens == 0
    await engine_call(engine, carried, 1, stop=("end",))([5, 6])
    assert engine.requests[-1].input_ids == [5, 6]


async def test_an_engine_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    class Deaf(ScriptedEngine):
        async def abort(self, request_ids: Sequence[str] | None = None) -> int:
            await asyncio.Event().wait()
            return 0

    monkeypatch.setattr("miles.rollout.carried.HAND_OVER_SECONDS", 0.01)
    engine, carried = Deaf(hold=True), Carried()
    asked = asyncio.ensure_future(engine_call(engine, carried, 0)([5]))
    await until(lambda: bool(engine.held))
    await hand_over(engine, [carried])
    assert carried.tokens == 0
    asked.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asked
    assert carried.asking == ""
