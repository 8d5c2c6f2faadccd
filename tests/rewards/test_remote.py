"""A reward server, real, on a real port."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from miles.config.reward import RewardSection
from miles.rewards.reward import RewardError, RewardScorer


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.bodies: list[dict] = []
        self.answers: list[tuple[int, str]] = []
        self.silent = threading.Event()
        self.lock = threading.Lock()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/score"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Server

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.bodies.append(body)
            status, text = (
                self.server.answers.pop(0) if self.server.answers else (200, json.dumps(float(body["response"] == body["label"])))
            )
        if status == 0:
            self.close_connection = True
            return
        if status == -1:
            self.server.silent.wait()
            return
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args):
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.silent.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def remote(scorer, server, monkeypatch) -> Callable[..., RewardScorer]:
    monkeypatch.setattr("miles.rewards.http.FIRST_PAUSE", 0.01)
    return lambda **settings: scorer("remote", reward_url=server.url, **settings)


async def test_the_server_gets_the_sample_and_scores_it(server, remote, answer):
    sample = answer("4", "4", metadata={"id": 7})
    await remote().score(sample)
    assert sample.reward == 1.0
    assert server.bodies == [{"prompt": "2+2?", "response": "4", "label": "4", "metadata": {"id": 7}}]


@pytest.mark.parametrize(
    ("text", "scored"),
    [
        ("0.25", (0.25, {})),
        ("null", (None, {})),
        ('{"reward": 1, "format": 0.5}', (1.0, {"format": 0.5})),
        ('{"reward": null}', (None, {})),
        ("true", (1.0, {})),
    ],
)
async def test_the_forms_of_an_answer(server, remote, answer, text, scored):
    server.answers = [(200, text)]
    sample = answer("x")
    await remote().score(sample)
    assert (sample.reward, sample.reward_details) == scored


@pytest.mark.parametrize("trouble", [[500], [502, 503], [429], [0], [0, 500, 0]])
async def test_passing_trouble_is_tried_again(server, remote, answer, trouble):
    server.answers = [(status, "busy") for status in trouble]
    sample = answer("4", "4")
    await remote().score(sample)
    assert sample.reward == 1.0
    assert len(server.bodies) == len(trouble) + 1


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([(400, "no such field")], "answered 400: no such field"),
        ([(404, "")], "answered 404"),
        ([(500, "broken")] * 4, "answered 500: broken"),
        ([(0, "")] * 4, "cannot be reached"),
        ([(200, "good")], "no JSON"),
        ([(200, '"good"')], "not a number"),
        ([(200, '{"score": 1}')], "not a number"),
        ([(-1, "")], "took longer than --reward-timeout 1 s"),
    ],
)
async def test_lasting_trouble_is_a_failure_that_says_why(server, remote, answer, answers, reason):
    server.answers = list(answers)
    with pytest.raises(RewardError, match=reason):
        await remote(reward_timeout=1 if answers[0][0] == -1 else 20).score(answer("x"))
    assert len(server.bodies) == len(answers)


async def test_nobody_listens(scorer, answer, server, monkeypatch):
    monkeypatch.setattr("miles.rewards.http.FIRST_PAUSE", 0.01)
    server.shutdown()
    server.server_close()
    sample = answer("x")
    await scorer("remote", reward_url=server.url, reward_failure="exclude").score(sample)
    assert "cannot be reached" in sample.error


async def test_many_at_once(server, remote, answer):
    samples = [answer(str(i), str(i - i % 2)) for i in range(100)]
    each = remote()
    await asyncio.gather(*(each.score(sample) for sample in samples))
    assert [sample.reward for sample in samples] == [1.0, 0.0] * 50


@pytest.mark.parametrize("url", [None, "", "localhost:80"])
def test_the_url_is_checked_at_start(url):
    with pytest.raises(ValueError, match="--reward-url"):
        RewardScorer(RewardSection(reward="remote", reward_url=url))
