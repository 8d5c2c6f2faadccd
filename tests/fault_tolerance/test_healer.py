"""The healer's decisions on a clock of its own; and the whole way through real HTTP."""

import asyncio

import pytest

from miles.config.run_config import RunConfig
from miles.fault_tolerance import api_server, mini_ft_controller
from miles.fault_tolerance.cells import CellState
from miles.fault_tolerance.healer import Action, Healer, MiniFtController

SUSPEND, RESUME = Action("engine-0", True), Action("engine-0", False)


def cell(healthy: str = "True", phase: str = "Running"):
    state = CellState("engine-0")
    state.change(phase=phase, healthy=(healthy, ""))
    return state.view()


def healer(**changes) -> Healer:
    return Healer(**{"resume_delay": 1.0, "cooldown": 30.0, "max_failures": 3, **changes})


def attempt(healer: Healer, now: float) -> float:
    """A sick cell is suspended and resumed; returns when."""
    assert healer.decide([cell("False")], now) == [SUSPEND]
    healer.done(SUSPEND, now)
    assert healer.decide([cell("False", "Suspended")], now + 0.5) == []
    assert healer.decide([cell("False", "Suspended")], now + 1.0) == [RESUME]
    healer.done(RESUME, now + 1.0)
    return now + 1.0


def test_well_and_unknown_cells_are_left_alone():
    doctor = healer()
    assert doctor.decide([cell("True"), cell("Unknown", "Pending")], 0.0) == []


def test_a_suspended_cell_is_brought_back():
    assert healer().decide([cell("Unknown", "Suspended")], 0.0) == [SUSPEND]


def test_success_is_followed_by_a_cooldown():
    doctor = healer()
    now = attempt(doctor, 0.0)
    assert doctor.decide([cell("Unknown", "Pending")], now + 100) == []
    assert doctor.decide([cell("True")], now + 101) == []
    assert doctor.decide([cell("False")], now + 101 + 29.9) == []
    assert doctor.decide([cell("False")], now + 101 + 30.0) == [SUSPEND]


def test_failures_back_off_and_end_loudly(caplog):
    doctor = healer()
    now = 0.0
    for wait in (5.0, 10.0):
        now = attempt(doctor, now)
        assert doctor.decide([cell("False")], now) == []  # the failure is noted
        assert doctor.decide([cell("False")], now + wait - 0.1) == []
        now += wait
    now = attempt(doctor, now)
    doctor.decide([cell("False")], now)
    assert [doctor.decide([cell("False")], now + hours * 3600.0) for hours in range(5)] == [[]] * 5
    assert [record.levelname for record in caplog.records if "giving it up after 3" in record.message] == ["ERROR"]


def test_a_success_clears_the_failures():
    doctor = healer(max_failures=2, cooldown=0.0)
    now = 0.0
    for _ in range(5):
        now = attempt(doctor, now)
        doctor.decide([cell("False")], now)
        now = attempt(doctor, now + 5.0)
        doctor.decide([cell("True")], now)


def test_a_cell_that_was_given_up_and_is_well_again_is_watched_again():
    doctor = healer(max_failures=1)
    now = attempt(doctor, 0.0)
    doctor.decide([cell("False")], now)
    doctor.decide([cell("True")], now + 1000)
    assert doctor.decide([cell("False")], now + 1001) == [SUSPEND]


def test_a_refused_action_is_a_failure():
    doctor = healer()
    assert doctor.decide([cell("False")], 0.0) == [SUSPEND]
    doctor.failed("engine-0", 0.0, "500")
    assert doctor.decide([cell("False")], 4.9) == []
    assert doctor.decide([cell("False")], 5.0) == [SUSPEND]


class Engines:
    """One engine that is well again once it has been suspended and resumed."""

    def __init__(self) -> None:
        self.state = CellState("engine-0")
        self.state.change(phase="Running", healthy=("False", "stuck"))
        self.well = asyncio.Event()
        self.calls: list[str] = []

    def cells(self):
        return [self.state.view()]

    async def suspend_cell(self, name: str) -> None:
        self.calls.append("suspend")
        self.state.change(suspend=True, phase="Suspended")

    async def resume_cell(self, name: str) -> None:
        self.calls.append("resume")
        self.state.change(suspend=False, phase="Running", healthy=("True", ""))
        self.well.set()

    async def inject_fault(self, name: str, kind) -> None:
        raise AssertionError


async def test_a_sick_engine_is_healed_through_the_api(tmp_path, free_port):
    args = RunConfig(
        run_root=str(tmp_path), api_server_port=free_port, mini_ft_controller=True, mini_ft_poll_interval=0.02, mini_ft_resume_delay=0.0
    )
    engines = Engines()
    try:
        api_server.maybe_start_api_server(args, {}, engines)
        mini_ft_controller.maybe_start_mini_ft_controller(args)
        await asyncio.wait_for(engines.well.wait(), 20)
    finally:
        await asyncio.to_thread(mini_ft_controller.stop)
        await asyncio.to_thread(api_server.stop)
    assert engines.calls == ["suspend", "resume"]


async def test_the_healer_is_off_unless_asked_for(tmp_path):
    assert mini_ft_controller.maybe_start_mini_ft_controller(RunConfig(run_root=str(tmp_path))) is None


async def test_an_api_that_is_down_is_no_cells_fault(tmp_path, free_port, caplog):
    doctor = MiniFtController(RunConfig(), f"http://127.0.0.1:{free_port}", "token")
    doctor.round()
    doctor.stop()
    assert doctor.healer.cases == {}
    assert "does not answer" in caplog.text


@pytest.fixture
def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
