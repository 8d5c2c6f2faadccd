"""The control API over real HTTP."""

import asyncio
import socket

import httpx
import pytest

from miles.config.run_config import RunConfig
from miles.fault_tolerance import api_app, api_server
from miles.fault_tolerance.cells import CellState, Load
from miles.fault_tolerance.token import read_token, token_path


class Controller:
    """Two engines; a suspend waits for `publish_over`, as the real one does for the publish lock."""

    def __init__(self) -> None:
        self.states = {name: CellState(name, {"role": "engine"}) for name in ("engine-0", "engine-1")}
        for state in self.states.values():
            state.change(phase="Running", healthy=("True", ""), serving=("True", ""), weight_version=3)
        self.publish_over = asyncio.Event()
        self.publish_over.set()
        self.suspended = asyncio.Event()
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.faults: list[tuple[str, str]] = []

    def cells(self):
        return [state.view() for state in self.states.values()]

    async def suspend_cell(self, name: str) -> None:
        self.loops.append(asyncio.get_running_loop())
        await self.publish_over.wait()
        self.states[name].change(suspend=True, phase="Suspended", serving=("False", "suspended"))
        self.suspended.set()

    async def resume_cell(self, name: str) -> None:
        if self.faults:
            raise RuntimeError("the engine does not start")
        self.states[name].change(suspend=False, phase="Running", serving=("True", ""))

    async def inject_fault(self, name: str, kind) -> None:
        self.faults.append((name, kind))
        self.states[name].change(healthy=("False", kind))


class Trainers:
    def cells(self):
        return [CellState("actor", {"role": "trainer"}).view()]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture
async def api(tmp_path):
    """(client with the token, controller, args)"""
    args = RunConfig(run_root=str(tmp_path), api_server_port=free_port())
    controller = Controller()
    server = api_server.maybe_start_api_server(args, {"actor": Trainers()}, controller)
    headers = {"Authorization": f"Bearer {read_token(token_path(args.run_dir))}"}
    async with httpx.AsyncClient(base_url=server.url, headers=headers, timeout=20) as client:
        yield client, controller, args
    await asyncio.to_thread(api_server.stop)


async def test_off_when_the_port_is_zero(tmp_path):
    assert api_server.maybe_start_api_server(RunConfig(run_root=str(tmp_path)), {}, Controller()) is None


async def test_health_is_open_and_the_rest_asks_for_the_token(api):
    client, _, args = api
    assert token_path(args.run_dir).stat().st_mode & 0o077 == 0
    async with httpx.AsyncClient(base_url=client.base_url) as stranger:
        assert (await stranger.get("/health")).json() == {"status": "ok"}
        for path in ("/cells", "/cells/engine-0", "/metrics"):
            assert (await stranger.get(path)).status_code == 401
        assert (await stranger.patch("/cells/engine-0", json={"spec": {"suspend": True}})).status_code == 401
        wrong = {"Authorization": "Bearer nonsense é".encode()}
        assert (await stranger.get("/cells", headers=wrong)).status_code == 401
        assert (await stranger.get("/docs")).status_code == 200


async def test_cells_are_listed_and_found(api):
    client, _, _ = api
    items = (await client.get("/cells")).json()["items"]
    assert [item["metadata"]["name"] for item in items] == ["engine-0", "engine-1", "actor"]
    cell = (await client.get("/cells/engine-1")).json()
    assert cell["status"]["phase"] == "Running"
    assert cell["status"]["weightVersion"] == 3
    missing = await client.get("/cells/engine-7")
    assert missing.status_code == 404
    assert "engine-0, engine-1, actor" in missing.json()["detail"]


async def test_suspend_and_resume_run_on_the_drivers_loop(api):
    client, controller, _ = api
    answer = await client.patch("/cells/engine-0", json={"spec": {"suspend": True}})
    assert (answer.status_code, answer.json()["status"]["phase"]) == (200, "Suspended")
    assert controller.loops == [asyncio.get_running_loop()]
    answer = await client.patch("/cells/engine-0", json={"spec": {"suspend": False}})
    assert (answer.status_code, answer.json()["status"]["phase"]) == (200, "Running")


async def test_a_suspend_that_waits_for_a_publish_is_accepted_and_done_later(api, monkeypatch):
    client, controller, _ = api
    monkeypatch.setattr(api_app, "ANSWER_SECONDS", 0.05)
    controller.publish_over.clear()
    answer = await client.patch("/cells/engine-0", json={"spec": {"suspend": True}})
    assert (answer.status_code, answer.json()["status"]["phase"]) == (202, "Running")
    controller.publish_over.set()
    await asyncio.wait_for(controller.suspended.wait(), 10)
    assert (await client.get("/cells/engine-0")).json()["status"]["phase"] == "Suspended"


async def test_a_stale_view_is_refused(api):
    client, controller, _ = api
    seen = (await client.get("/cells/engine-0")).json()["metadata"]["resourceVersion"]
    controller.states["engine-0"].change(weight_version=4)
    stale = await client.post("/cells/engine-0/inject-fault", json={"kind": "kill", "resourceVersion": seen})
    assert stale.status_code == 409
    assert controller.faults == []
    patch = {"spec": {"suspend": True}, "metadata": {"resourceVersion": seen}}
    assert (await client.patch("/cells/engine-0", json=patch)).status_code == 409
    now = (await client.get("/cells/engine-0")).json()["metadata"]["resourceVersion"]
    answer = await client.post("/cells/engine-0/inject-fault", json={"kind": "kill", "resourceVersion": now})
    assert answer.status_code == 200
    assert controller.faults == [("engine-0", "kill")]


async def test_what_makes_no_sense_is_refused(api):
    client, controller, _ = api
    assert (await client.patch("/cells/engine-0", json={"spec": {"suspend": True, "replicas": 2}})).status_code == 422
    assert (await client.post("/cells/engine-0/inject-fault", json={"kind": "kill"})).status_code == 422
    assert (await client.patch("/cells/actor", json={"spec": {"suspend": True}})).status_code == 422
    assert (await client.patch("/cells/nobody", json={"spec": {"suspend": True}})).status_code == 404
    assert not controller.loops


async def test_a_resume_that_fails_says_why(api):
    client, controller, _ = api
    controller.faults.append(("engine-0", "kill"))
    answer = await client.patch("/cells/engine-0", json={"spec": {"suspend": False}})
    assert answer.status_code == 500
    assert "the engine does not start" in answer.json()["detail"]


async def test_metrics_in_prometheus_text(api):
    client, controller, _ = api
    controller.states["engine-1"].load = Load(running=2, waiting=7, tokens=500, tokens_cut=0)
    text = (await client.get("/metrics")).text
    assert 'miles_cell_condition{cell="engine-0",type="Healthy"} 1' in text
    assert 'miles_cell_condition{cell="actor",type="Healthy"} -1' in text
    assert 'miles_cell_weight_version{cell="engine-1"} 3' in text
    assert 'miles_engine_requests{cell="engine-1",state="waiting"} 7' in text
    assert 'miles_engine_tokens_total{cell="engine-1"} 500' in text
    assert 'cell="engine-0",state' not in text, "no probe has answered yet"
    assert "miles_rollout_reward 0.5\n" in api_app.prometheus_text([], {"rollout/reward": 0.5})
    assert "miles_train_loss NaN\n" in api_app.prometheus_text([], {"train/loss": float("nan")})


async def test_openapi_describes_the_routes(api):
    client, _, _ = api
    paths = (await client.get("/openapi.json")).json()["paths"]
    assert set(paths) == {"/health", "/cells", "/cells/{name}", "/cells/{name}/inject-fault", "/metrics"}


async def test_a_port_that_is_taken_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"--api-server-port {port}: cannot listen"):
            api_server.maybe_start_api_server(RunConfig(run_root=str(tmp_path), api_server_port=port), {}, Controller())


async def test_the_port_is_free_again_after_stop(tmp_path):
    args = RunConfig(run_root=str(tmp_path), api_server_port=free_port())
    for _ in range(2):
        api_server.maybe_start_api_server(args, {}, Controller())
        await asyncio.to_thread(api_server.stop)
    await asyncio.to_thread(api_server.stop)
