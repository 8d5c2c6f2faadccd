"""A served teacher, from the side that asks. That a real server scores right is with the engines' contract."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from transformers import AutoTokenizer

from miles.rollout.generate import EngineFailed, PromptRefused
from miles.rollout.teacher import Teacher
from miles.types import Sample
from tests.rollout.scripted_engine import ScriptedEngine
from tests.rollout.small_run import MakeArgs, Start


class Server:
    """Says of token i that its log-prob is -i / 1000, in SGLang's form; or what a fault makes of it."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer, self.faults, self.asked = tokenizer, [], []

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body)
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, int):
            return web.json_response({"error": {"message": "as scripted"}}, status=fault)
        ids = body["input_ids"][body["logprob_start_len"] :]
        entries = [[-token / 1000, token, self.tokenizer.decode([token]) if body["return_text_in_logprobs"] else None] for token in ids]
        entries[0][0] = None
        if fault == "others":
            entries[-1][1] += 1
        if fault == "nan":
            entries[-1][0] = math.nan
        return web.json_response({"text": "", "meta_info": {"input_token_logprobs": entries}})


@pytest.fixture
async def servers(tiny_model: str) -> AsyncIterator[list[tuple[Server, str]]]:
    started, made = [], []
    for _ in range(2):
        script, app = Server(AutoTokenizer.from_pretrained(tiny_model)), web.Application()
        app.router.add_post("/generate", script.generate)
        started.append(TestServer(app))
        await started[-1].start_server(shutdown_timeout=1.0)  # of connections that the asking side holds still
        made.append((script, str(started[-1].make_url("/"))))
    yield made
    for server in started:
        await server.close()


def sample() -> Sample:
    return Sample(0, 0, "", [5, 6, 7], response_ids=[19, 300, 2])


@pytest.fixture
async def teacher(servers: list[tuple[Server, str]]) -> AsyncIterator[Teacher]:
    made = Teacher([url for _, url in servers], servers[0][0].tokenizer, 20)
    yield made
    await made.dispose()


async def test_every_response_token_is_scored_given_all_before_it(teacher: Teacher, servers: list[tuple[Server, str]]) -> None:
    await teacher.check()
    await teacher.score(one := sample())
    assert one.teacher_logprobs == [-0.019, -0.3, -0.002]
    body = servers[0][0].asked[-1]
    assert (body["input_ids"], body["logprob_start_len"], body["sampling_params"]["max_new_tokens"]) == ([5, 6, 7, 19, 300, 2], 2, 0)
    empty = Sample(0, 0, "", [5])
    await teacher.score(empty)
    assert empty.teacher_logprobs == []


async def test_a_server_that_fails_is_replaced_by_the_other_and_three_failures_are_told(
    teacher: Teacher, servers: list[tuple[Server, str]]
) -> None:
    servers[0][0].faults = [503]
    await teacher.score(one := sample())
    assert one.teacher_logprobs == [-0.019, -0.3, -0.002]
    assert [len(script.asked) for script, _ in servers] == [1, 1]
    for script, _ in servers:
        script.faults = [503] * 3
    with pytest.raises(EngineFailed, match=r"the teacher scored nothing: http.*503.*; http.*503.*; http.*503"):
        await teacher.score(sample())
    for script, _ in servers:
        script.faults = []
    await teacher.score(one := sample())
    assert teacher._busy == [0, 0]


@pytest.mark.parametrize(
    ("fault", "error", "message"),
    [(400, PromptRefused, "as scripted"), ("others", EngineFailed, "scored other tokens"), ("nan", EngineFailed, "are not finite")],
)
async def test_what_cannot_be_used_is_told_and_never_trained(
    teacher: Teacher, servers: list[tuple[Server, str]], fault: Any, error: type[Exception], message: str
) -> None:
    servers[0][0].faults = [fault]
    with pytest.raises(error, match=rf"teacher at {servers[0][1].rstrip('/')}.*{message}"):
        await teacher.score(sample())


async def test_another_tokenizer_and_a_server_that_is_not_there_are_refused_at_the_start(
    teacher: Teacher, servers: list[tuple[Server, str]], tiny_model: str
) -> None:
    servers[1][0].tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    servers[1][0].tokenizer.decode = lambda ids: "x"  # type: ignore[method-assign]
    with pytest.raises(
        ValueError, match=rf"--teacher-urls: the teacher at {servers[1][1].rstrip('/')} has another tokenizer .*254 are others.*'x' there"
    ):
        await teacher.check()
    gone = Teacher(["http://127.0.0.1:9"], servers[0][0].tokenizer, 20)
    with pytest.raises(ValueError, match=r"--teacher-urls: http://127\.0\.0\.1:9 does not score tokens"):
        await gone.check()
    await gone.dispose()


async def test_its_word_goes_with_the_tokens_and_through_a_checkpoint(
    servers: list[tuple[Server, str]], make_args: MakeArgs, start: Start, tmp_path: Path
) -> None:
    urls = [url for _, url in servers]
    settings = {"teacher_urls": urls, "fully_async": True, "max_weight_staleness": 3, "max_concurrent_groups": 4, "buffer_factor": 2}
    executor = await start(make_args(**settings), ScriptedEngine())
    data = executor.store.get((await executor.get(0)).shares[0]).data
    trained = data.loss_mask == 1
    np.testing.assert_array_equal(data.teacher_logprobs[trained], (-data.token_ids[trained] / 1000).astype(np.float32))
    assert not data.teacher_logprobs[~trained].any()
    await executor.save(0, str(tmp_path))
    again = await start(make_args(**settings), ScriptedEngine(), load=(0, tmp_path))
    data = again.store.get((await again.get(1)).shares[0]).data
    trained = data.loss_mask == 1
    np.testing.assert_array_equal(data.teacher_logprobs[trained], (-data.token_ids[trained] / 1000).astype(np.float32))


async def test_groups_that_it_cannot_score_are_started_again(make_args: MakeArgs, start: Start, servers: list[tuple[Server, str]]) -> None:
    executor = await start(make_args(teacher_urls=[servers[0][1]], rollout_batch_size=1, n_samples_per_prompt=1), ScriptedEngine())
    servers[0][0].faults = [503] * 3
    ref = await executor.get(0)
    assert ref.metrics["rollout/groups_retried"] == 1
