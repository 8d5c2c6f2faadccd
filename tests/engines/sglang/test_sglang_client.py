"""HTTP to a server: patience with what passes, limits, and thousands of requests at once."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from miles.engines.sglang.client import Client, ServerRefused
from miles.engines.sglang.server import ServerGone


class Scripted:
    """Answers with the next of `statuses`, then with 200; holds generations until `most` of them are there."""

    def __init__(self) -> None:
        self.statuses: list[int] = []
        self.calls: list[str] = []
        self.inside, self.most, self.full = 0, 1, asyncio.Event()

    async def control(self, request: web.Request) -> web.Response:
        self.calls.append(request.path)
        status = self.statuses.pop(0) if self.statuses else 200
        return web.json_response({"success": status == 200, "message": "as scripted"}, status=status)

    async def generate(self, request: web.Request) -> web.Response:
        self.inside += 1
        if self.inside >= self.most:
            self.full.set()
        await self.full.wait()
        return web.json_response({"rid": (await request.json())["rid"]})


@pytest.fixture
async def scripted() -> AsyncIterator[tuple[Scripted, TestServer]]:
    script, app = Scripted(), web.Application()
    app.router.add_post("/generate", script.generate)
    app.router.add_route("*", "/{any}", script.control)
    server = TestServer(app)
    await server.start_server()
    yield script, server
    await server.close()


@pytest.fixture
async def client(scripted: tuple[Scripted, TestServer]) -> AsyncIterator[Client]:
    made = Client(str(scripted[1].make_url("/")), timeout=20)
    yield made
    await made.close()


@pytest.mark.case("C85")
@pytest.mark.parametrize("statuses", [[502], [503, 502]])
async def test_a_fault_that_passes_is_tried_again(scripted: tuple[Scripted, TestServer], client: Client, statuses: list[int]) -> None:
    script = scripted[0]
    script.statuses = list(statuses)
    assert (await client.post("/pause_generation"))["success"]
    assert script.calls == ["/pause_generation"] * (len(statuses) + 1)


@pytest.mark.case("C85")
async def test_a_fault_that_stays_is_an_error_after_a_few_tries(scripted: tuple[Scripted, TestServer], client: Client) -> None:
    script = scripted[0]
    script.statuses = [502] * 9
    with pytest.raises(ServerRefused, match="502 to /pause_generation: as scripted"):
        await client.post("/pause_generation")
    assert len(script.calls) == 4


async def test_a_refusal_is_not_tried_again_and_may_be_expected(scripted: tuple[Scripted, TestServer], client: Client) -> None:
    script = scripted[0]
    script.statuses = [400, 400]
    with pytest.raises(ServerRefused, match="400"):
        await client.post("/flush_cache")
    assert await client.post("/flush_cache", accept=(400,)) is None
    assert len(script.calls) == 2


async def test_two_thousand_requests_are_in_the_server_at_once(scripted: tuple[Scripted, TestServer], client: Client) -> None:
    script = scripted[0]
    script.most = 2000
    async with asyncio.timeout(120):
        calls = [asyncio.create_task(client.generate({"rid": f"r{i}."})) for i in range(2000)]
        await script.full.wait()
        assert (await client.post("/pause_generation"))["success"], "a control call waits for no generation"
        answers = await asyncio.gather(*calls)
    assert [answer["rid"] for answer in answers] == [f"r{i}." for i in range(2000)]


async def test_a_lost_connection_asks_whether_the_server_lives(scripted: tuple[Scripted, TestServer]) -> None:
    def gone() -> None:
        raise ServerGone("exit code 1")

    url = str(scripted[1].make_url("/"))
    await scripted[1].close()
    client = Client(url, timeout=20, check=gone)
    with pytest.raises(ServerGone):
        await client.generate({})
    with pytest.raises(ServerGone):
        await client.post("/pause_generation")
    quiet = Client(url, timeout=20, tries=2)
    with pytest.raises(OSError):
        await quiet.post("/pause_generation")
    for made in (client, quiet):
        await made.close()
