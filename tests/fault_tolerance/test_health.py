"""C81: slow is not dead, and a good health that generates nothing is."""

import asyncio

import pytest

from miles.fault_tolerance.health import HealthJudge, Verdict, watch
from miles.types import EngineHealth


def health(**changes) -> EngineHealth:
    return EngineHealth(**{"healthy": True, "weight_version": 1, "running": 1, "waiting": 0, "paused": False, **changes})


def judge(**changes) -> HealthJudge:
    made = HealthJudge(**{"failures": 3, "stuck": 120.0, "grace": 300.0, **changes})
    made.start(0.0)
    return made


def fail(judge: HealthJudge, now: float) -> Verdict:
    probe = judge.send(now)
    assert probe is not None
    return judge.bad(probe, now, "503")


@pytest.mark.case("C81")
def test_a_cold_start_may_answer_503_for_a_minute():
    engine = judge()
    assert {fail(engine, float(now)) for now in range(0, 60, 5)} == {Verdict.UNKNOWN}
    assert engine.good(engine.send(60.0), health()) is Verdict.HEALTHY


@pytest.mark.case("C81")
def test_a_cold_start_that_never_ends_is_found_after_its_grace():
    engine = judge(grace=100.0)
    verdicts = [fail(engine, float(now)) for now in range(90, 140, 10)]
    assert verdicts[:3] == [Verdict.UNKNOWN] * 3
    assert verdicts[3] is Verdict.UNHEALTHY
    assert "503" in engine.reason


@pytest.mark.case("C81")
def test_busy_with_one_big_request_for_twenty_seconds_is_healthy():
    engine = judge()
    for now in (0.0, 10.0, 20.0):
        assert engine.good(engine.send(now), health(stuck_seconds=now)) is Verdict.HEALTHY


@pytest.mark.case("C81")
def test_one_lost_probe_is_forgotten_by_the_next_good_one():
    engine = judge()
    engine.good(engine.send(0.0), health())
    for now in range(20):
        assert fail(engine, now) is Verdict.HEALTHY
        assert fail(engine, now) is Verdict.HEALTHY
        assert engine.good(engine.send(now), health()) is Verdict.HEALTHY


@pytest.mark.case("C81")
def test_nothing_counts_while_paused_nor_probes_sent_before():
    engine = judge(failures=1)
    engine.good(engine.send(0.0), health())
    before = engine.send(1.0)
    engine.pause()
    assert engine.send(2.0) is None
    assert engine.bad(before, 11.0, "timed out") is Verdict.HEALTHY
    engine.resume()
    assert engine.bad(before, 12.0, "timed out") is Verdict.HEALTHY
    assert engine.good(before, health(stuck_seconds=500.0)) is Verdict.HEALTHY
    assert fail(engine, 13.0) is Verdict.UNHEALTHY


@pytest.mark.case("C81")
def test_a_pause_forgets_the_failures_before_it():
    engine = judge(failures=2)
    engine.good(engine.send(0.0), health())
    fail(engine, 1.0)
    engine.pause()
    engine.resume()
    assert fail(engine, 2.0) is Verdict.HEALTHY


@pytest.mark.case("C81")
def test_good_health_that_never_answers_is_found():
    engine = judge(stuck=120.0)
    assert engine.good(engine.send(110.0), health(stuck_seconds=110.0)) is Verdict.HEALTHY
    assert engine.good(engine.send(120.0), health(stuck_seconds=120.0)) is Verdict.UNHEALTHY
    assert "no token for 120 s" in engine.reason


def test_a_restart_begins_anew():
    engine = judge(failures=1, grace=10.0)
    fail(engine, 20.0)
    assert engine.verdict is Verdict.UNHEALTHY
    old = engine.send(21.0)
    engine.start(30.0)
    assert engine.verdict is Verdict.UNKNOWN
    assert engine.bad(old, 41.0, "late") is Verdict.UNKNOWN
    assert fail(engine, 35.0) is Verdict.UNKNOWN


async def test_watch_probes_judges_and_tells_changes_only():
    """The loop on a clock of its own: each sleep is a tick."""
    now = 0.0
    told = []

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds
        await asyncio.sleep(0)
        if now >= 90:
            raise asyncio.CancelledError

    async def probe() -> EngineHealth:
        if now < 30:
            raise ConnectionError("refused")
        if now < 60:
            return health()
        raise ProcessLookupError("gone")

    engine = judge(grace=40.0)
    with pytest.raises(asyncio.CancelledError):
        await watch(
            engine,
            probe,
            interval=10.0,
            timeout=1.0,
            on_verdict=lambda verdict, reason: told.append((verdict.value, reason)),
            fatal=(ProcessLookupError,),
            clock=lambda: now,
            sleep=sleep,
        )
    assert told == [("Unknown", "starting: ConnectionError: refused"), ("True", ""), ("False", "ProcessLookupError: gone")]


async def test_watch_gives_a_silent_probe_its_time_and_no_more():
    rounds = 0

    async def sleep(seconds: float) -> None:
        nonlocal rounds
        rounds += 1
        if rounds == 2:
            raise asyncio.CancelledError

    async def probe() -> EngineHealth:
        await asyncio.Event().wait()
        raise AssertionError

    engine = HealthJudge(failures=2, stuck=1.0, grace=0.0)
    engine.start(0.0)
    with pytest.raises(asyncio.CancelledError):
        await watch(engine, probe, interval=1, timeout=0.01, on_verdict=lambda *_: None, sleep=sleep)
    assert engine.verdict is Verdict.UNHEALTHY
    assert "no answer within 0.01 s" in engine.reason
