import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
import ray

from miles.config.reward import RewardSection
from miles.rewards.reward import GroupRewardError, RewardError, RewardScorer
from miles.types import PromptGroup, Sample

GOOD = ["label_in_response", "label_in_response_async"]


@pytest.mark.parametrize("function", GOOD)
@pytest.mark.parametrize("workers", [0, 1])
async def test_scores_sync_and_async_functions(scorer, answer, function, workers):
    each = scorer(f"reward_functions.{function}", reward_workers=workers)
    right, wrong = answer("it is 4"), answer("it is 5")
    await each.score_group(PromptGroup(1, 0, 0, [right, wrong]))
    assert (right.reward, wrong.reward) == (1.0, 0.0)
    assert right.error is None


@pytest.mark.parametrize("function", ["Scaled", "ScaledAsync"])
@pytest.mark.parametrize("workers", [0, 1])
async def test_a_class_is_made_with_the_settings(scorer, answer, function, workers):
    sample = answer("")
    await scorer(f"reward_functions.{function}", reward_workers=workers, reward_timeout=17).score(sample)
    assert sample.reward == 17.0


async def test_a_class_says_how_many_of_its_calls_go_at_once(scorer, answer):
    samples = [answer("x") for _ in range(9)]
    await scorer("reward_functions.TwoAtOnce").score_group(PromptGroup(1, 0, 0, samples))
    assert max(sample.reward for sample in samples) == 2.0


@pytest.mark.parametrize("workers", [0, 1])
async def test_a_table_gives_details_and_none_is_unscored(scorer, answer, workers):
    sample = answer("", response_ids=[1, 2])
    await scorer("reward_functions.table", reward_workers=workers).score(sample)
    assert (sample.reward, sample.reward_details) == (0.5, {"format": 1.0, "length": 2.0})
    unscored = scorer("reward_functions.nothing", reward_workers=workers)
    await unscored.score(sample)
    assert (sample.reward, unscored.num_unscored, unscored.num_failed) == (None, 1, 0)


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        ("raises", 'KeyError: "the user\'s own mistake"'),
        ("raises_async", 'KeyError: "the user\'s own mistake"'),
        ("exits", "SystemExit: 3"),
        ("text", "the reward is 'good', a str and not a number"),
        ("text_of_a_number", "the reward is '0.5', a str and not a number"),
        ("text_in_details", "the detail 'judged' is '0.5', a str and not a number"),
        ("array", "can be converted to Python scalars"),
        ("infinite", "the reward is -inf, not a finite number"),
        ("nan", "not a finite number"),
        ("mute", "Mute, whose text cannot be had"),
        ("unlike", "Unlike: nothing that one would catch"),
        ("unlike_async", "Unlike: nothing that one would catch"),
        ("beyond_float32", "1e+300, which no float32 can hold"),
        ("digits", "int too large to convert to float"),
        ("generator", "generator"),
        ("async_generator", "async_generator"),
        ("hang_async", "took longer than --reward-timeout 1 s"),
    ],
)
async def test_a_bad_reward_meets_the_policy(scorer, answer, function, reason):
    limit = 1 if function == "hang_async" else 60

    def make(policy, workers=0):
        return scorer(f"reward_functions.{function}", reward_failure=policy, reward_timeout=limit, reward_workers=workers)

    with pytest.raises(RewardError, match="sample 3") as failure:
        await make("fail", workers=1).score(answer("x"))
    assert reason in str(failure.value)
    if function.startswith("raises"):
        assert "helper_of_raises" in str(failure.value)
        assert str(failure.value).endswith(reason)

    with pytest.raises(GroupRewardError):
        await make("drop_group").score_group(PromptGroup(1, 0, 0, [answer("x")]))

    sample, lenient = answer("x"), make("exclude")
    await lenient.score(sample)
    assert sample.reward is None
    assert reason in (sample.error or "")
    assert (lenient.num_failed, lenient.num_unscored) == (1, 1)


@pytest.mark.parametrize("kind", ["bool", "numpy", "numpy int", "numpy bool", "numpy scalar array", "fraction"])
async def test_whatever_is_a_number_is_a_reward(scorer, answer, kind):
    sample = answer(kind)
    await scorer("reward_functions.numbers", reward_workers=0).score(sample)
    assert type(sample.reward) is float
    assert sample.reward == 1.0


async def test_a_reward_that_leaks_costs_no_sample(scorer, answer, caplog):
    """Its process is replaced when what it left has filled it, and the sample that met the limit is scored by the next one."""
    each = scorer("reward_functions.leaks", reward_workers=1, reward_memory_gb=0.25)
    samples = [answer("x") for _ in range(40)]
    for sample in samples:
        await each.score(sample)
    assert [sample.reward for sample in samples] == [1.0] * 40
    assert caplog.text.count("has reached --reward-memory-gb") >= 2


async def test_the_child_of_a_reward_that_forks_answers_nobody(scorer, answer):
    """Or the next sample would get its answer."""
    each = scorer("reward_functions.forks_and_forgets", reward_timeout=60, reward_workers=1)
    samples = [answer("x") for _ in range(4)]
    for sample in samples:
        await each.score(sample)
    assert [sample.reward for sample in samples] == [1.0] * 4


async def test_what_hangs_or_dies_is_replaced_and_nobody_else_loses(scorer, answer, tmp_path):
    each = scorer("reward_functions.as_told", reward_timeout=2.0, reward_workers=2, reward_failure="exclude", reward_memory_gb=2)
    told = ["fine", "hang", "fine", "spin", "die", "fine", "eat", "raise", "fine", "hold the interpreter", "die once", "fine"]
    samples = [answer(what, metadata={"marker": str(tmp_path / "died")}) for what in told]
    await each.score_group(PromptGroup(1, 0, 0, samples))
    by_order = dict(zip(told, samples, strict=True))
    assert [s.reward for s in samples if s.response == "fine"] == [1.0] * 5
    assert by_order["die once"].reward == 1.0
    for what, reason in {
        "hang": "took longer than --reward-timeout 2 s",
        "spin": "took longer than",
        "hold the interpreter": "took longer than",
        "die": "signal 9",
        "eat": "--reward-memory-gb",
        "raise": "ValueError: as told",
    }.items():
        assert by_order[what].reward is None
        assert reason in by_order[what].error
    assert each.num_failed == 6


@pytest.mark.parametrize(("what", "where"), [("hang", "in as_told"), ("spin", "in as_told"), ("hold the interpreter", "in match")])
async def test_what_hangs_says_where(scorer, answer, what, where):
    with pytest.raises(RewardError, match="took longer") as failure:
        await scorer("reward_functions.as_told", reward_timeout=0.5).score(answer(what))
    assert where in str(failure.value)
    assert "reward_functions.py" in str(failure.value)
    assert "worker.py" not in str(failure.value)


async def test_an_idle_worker_that_was_killed_is_replaced_unnoticed(scorer, answer):
    each = scorer("reward_functions.pid", reward_workers=1)
    first, second = answer("x"), answer("x")
    await each.score(first)
    os.kill(int(first.reward), signal.SIGKILL)
    await each.score(second)
    assert second.reward != first.reward


@pytest.mark.parametrize("function", ["hang_async", "ignore_cancellation"])
async def test_cancelling_does_not_wait_for_the_reward(scorer, answer, function):
    task = asyncio.ensure_future(scorer(f"reward_functions.{function}").score(answer("x")))
    await asyncio.sleep(0)
    task.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - started < 0.4


async def test_a_limit_holds_against_a_function_that_ignores_cancellation(scorer, answer):
    sample = answer("x")
    started = time.monotonic()
    await scorer("reward_functions.ignore_cancellation", reward_timeout=0.05, reward_failure="exclude").score(sample)
    assert time.monotonic() - started < 0.4
    assert "took longer" in (sample.error or "")


async def test_dispose_ends_workers_that_hang_and_their_children(answer, tmp_path):
    scorer = RewardScorer(RewardSection(reward="reward_functions.as_told"))
    marker = tmp_path / "child"
    task = asyncio.ensure_future(scorer.score(answer("leave a child", metadata={"marker": str(marker)})))
    await asyncio.to_thread(_wait_until, lambda: marker.exists() and marker.read_text())
    pids = [*scorer.pids(), int(marker.read_text())]
    assert len(pids) == 2
    await scorer.dispose()
    await scorer.dispose()
    with pytest.raises(RewardError):
        await task
    assert not any(_runs(pid) for pid in pids)


@pytest.mark.parametrize("what", ["fine", "hang", "hold the interpreter"])
def test_no_worker_outlives_its_parent(what, tmp_path):
    code = f"""
import asyncio, sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
from miles.config.reward import RewardSection
from miles.rewards.reward import RewardScorer
from miles.types import Sample
scorer = RewardScorer(RewardSection(reward="reward_functions.as_told", reward_timeout=1.0))
async def main():
    await scorer.score(Sample(0, 0, "p", [1], response="fine"))
    print(*scorer.pids(), flush=True)
    await scorer.score(Sample(0, 0, "p", [1], response={what!r}))
    await asyncio.sleep(3600)
asyncio.run(main())
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    _wait_until(lambda: not _runs(pid))


@pytest.mark.case("C17")
@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("reward", ["math", "reward_functions.label_in_response", "reward_functions.label_in_response_async"])
async def test_scores_on_the_main_thread_in_threads_and_many_at_once(scorer, answer, reward, workers):
    each = scorer(reward, reward_workers=workers)
    samples = [answer(r"\boxed{\frac{1}{3}}", r"\frac{1}{3}") for _ in range(6)]
    await asyncio.gather(*(each.score(sample) for sample in samples[:2]))
    threads = [threading.Thread(target=lambda sample=sample: asyncio.run(each.score(sample))) for sample in samples[2:]]
    for thread in threads:
        thread.start()
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert [sample.reward for sample in samples] == [1.0] * 6


@pytest.mark.case("C17")
def test_scores_in_a_ray_actor_with_several_threads(local_ray):
    class Scores:
        def __init__(self):
            self.scorer = RewardScorer(RewardSection(reward="math", reward_workers=2))

        def score(self, label):
            sample = Sample(0, 0, "p", [1], label=label, response=r"\boxed{\frac{1}{3}}")
            asyncio.run(self.scorer.score(sample))
            return sample.reward

        def dispose(self):
            asyncio.run(self.scorer.dispose())

    actor = ray.remote(max_concurrency=4, runtime_env={"env_vars": local_ray.env()})(Scores).remote()
    labels = [r"\frac{1}{3}", "3"] * 8
    assert ray.get([actor.score.remote(label) for label in labels], timeout=100) == [1.0, 0.0] * 8
    ray.get(actor.dispose.remote(), timeout=30)
    ray.kill(actor)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("maths", "--reward: 'maths' is neither built in"),
        ("no_such_module.f", "--reward: no module 'no_such_module'"),
        ("reward_functions.missing", "has no 'missing'"),
        ("math.pi", "--reward: math.pi is 3.14.*, not a function"),
    ],
)
def test_a_wrong_name_is_told_at_start(name, reason):
    with pytest.raises(ValueError, match=reason):
        RewardScorer(RewardSection(reward=name))


def _wait_until(true, limit=20.0):
    deadline = time.monotonic() + limit
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def _runs(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
