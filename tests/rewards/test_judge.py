"""A judge, real, on a real port: an OpenAI-compatible server of a few lines."""

import asyncio
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from miles.config.reward import RewardSection
from miles.rewards.judge import filled
from miles.rewards.reward import RewardError, RewardScorer


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[tuple[str, str | None, dict]] = []
        self.answers: list[tuple[int, object]] = []
        self.lock = threading.Lock()
        self.open = self.most_open = 0
        self.gate = threading.Event()
        self.gate.set()
        self.full = threading.Event()  # three questions at once were seen

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_address[1]}/v1/"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.lock:
            self.server.asked.append((self.path, self.headers["Authorization"], body))
            self.server.open += 1
            self.server.most_open = max(self.server.most_open, self.server.open)
            if self.server.open == 3:
                self.server.full.set()
            status, said = self.server.answers.pop(0) if self.server.answers else (200, "Good.\nScore: 8")
        self.server.gate.wait(20)
        text = json.dumps({"choices": [{"message": {"role": "assistant", "content": said}}]} if isinstance(said, str) else said).encode()
        with self.server.lock:
            self.server.open -= 1
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("miles.rewards.http.FIRST_PAUSE", 0.01)
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.gate.set()
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def judge(scorer, server):
    return lambda **settings: scorer("judge", judge_url=server.url, judge_model="small", **settings)


async def test_the_judge_is_asked_and_its_score_counts(server, judge, answer):
    sample = answer("four, {label}", "4")
    await judge().score(sample)
    assert sample.reward == 0.8
    ((path, key, body),) = server.asked
    assert (path, key, body["model"], body["temperature"]) == ("/v1/chat/completions", None, "small", 0)
    (message,) = body["messages"]
    assert message["role"] == "user"
    assert "2+2?" in message["content"]
    assert "four, {label}" in message["content"]


@pytest.mark.parametrize(
    ("said", "wanted"),
    [
        ("Score: 10", ({}, 1.0)),
        ("score = 0", ({}, 0.0)),
        ("The answer says Score: 10, but no.\n**Score:** 2.5", ({}, 0.25)),
        ("Score: 7/10", ({}, 0.7)),
        ('{"why": "ok", "score": 4}', ({"judge_max_score": 5.0}, 0.8)),
        ("Verdict [[1]]", ({"judge_pattern": r"\[\[(\d)\]\]", "judge_max_score": 1.0}, 1.0)),
    ],
)
async def test_how_a_score_may_be_stated(server, judge, answer, said, wanted):
    settings, reward = wanted
    server.answers = [(200, said)]
    sample = answer("x")
    await judge(**settings).score(sample)
    assert sample.reward == reward


@pytest.mark.parametrize(
    ("answers", "reason"),
    [
        ([(200, "I like it")], "gave no score that --judge-pattern finds"),
        ([(200, "")], "gave no score"),
        ([(200, "Score: 11")], "gave 11, outside 0 to --judge-max-score 10"),
        ([(200, "Score: -1")], "gave -1"),
        ([(200, {"error": "none"})], "has no choices"),
        ([(200, {"choices": []})], "has no choices"),
        ([(401, "no key")], "answered 401"),
        ([(500, "x")] * 4, "answered 500"),
    ],
)
async def test_no_score_is_a_failure_never_a_zero(server, judge, answer, answers, reason):
    server.answers = list(answers)
    with pytest.raises(RewardError, match=reason):
        await judge().score(answer("x"))
    server.answers = list(answers)
    sample, lenient = answer("x"), judge(reward_failure="exclude")
    await lenient.score(sample)
    assert (sample.reward, lenient.num_failed) == (None, 1)


@pytest.mark.parametrize("trouble", [[500], [429, 503]])
async def test_passing_trouble_is_tried_again(server, judge, answer, trouble):
    server.answers = [(status, "busy") for status in trouble]
    sample = answer("x")
    await judge().score(sample)
    assert sample.reward == 0.8


async def test_a_prompt_and_a_key_of_ones_own(server, judge, answer, tmp_path, monkeypatch):
    (tmp_path / "ask.txt").write_text("Q {prompt} A {response} L {label} {other}")
    (tmp_path / "key").write_text("s3cret\n")
    await judge(judge_prompt=str(tmp_path / "ask.txt"), judge_key=f"file:{tmp_path / 'key'}").score(answer("x"))
    monkeypatch.setenv("OUR_JUDGE", "other")
    await judge(judge_key="env:OUR_JUDGE").score(answer("x"))
    assert [key for _, key, _ in server.asked] == ["Bearer s3cret", "Bearer other"]
    assert server.asked[0][2]["messages"][0]["content"] == "Q 2+2? A x L 4 {other}"


def test_an_answer_cannot_fill_in_the_template(answer):
    sample = answer("{label} {prompt}", "secret")
    assert filled("{response}|{label}", sample) == "{label} {prompt}|secret"
    sample.prompt = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert filled("{prompt}", sample) == "system: s\n\nuser: q"


async def test_no_more_than_allowed_at_once_and_waiting_is_not_counted(server, judge, answer):
    samples = [answer("x") for _ in range(12)]
    server.gate.clear()
    each = judge(judge_concurrency=3, reward_timeout=20)
    work = asyncio.gather(*(each.score(sample) for sample in samples))
    await asyncio.to_thread(server.full.wait, 20)
    server.gate.set()
    await work
    assert server.most_open == 3
    assert [sample.reward for sample in samples] == [0.8] * 12


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"judge_url": None}, "--judge-url"),
        ({"judge_url": "localhost"}, "--judge-url"),
        ({"judge_model": None}, "--judge-model"),
        ({"judge_key": "sk-123"}, "--judge-key: wants file:PATH or env:NAME"),
        ({"judge_key": "env:NOT_THERE_AT_ALL"}, "no such environment variable"),
        ({"judge_key": "file:/nowhere"}, "--judge-key file:/nowhere: No such file"),
        ({"judge_prompt": "/nowhere"}, "--judge-prompt /nowhere"),
        ({"judge_pattern": "("}, "not a regular expression"),
        ({"judge_pattern": "score"}, "wants one group"),
    ],
)
def test_what_is_wrong_is_told_at_start(settings, reason):
    with pytest.raises(ValueError, match=reason):
        RewardScorer(RewardSection(**{"reward": "judge", "judge_url": "http://x/v1", "judge_model": "m", **settings}))
