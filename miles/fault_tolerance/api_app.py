"""The control API's routes, and the thread that serves them: look at cells, suspend and resume them, break them on purpose."""

import asyncio
import logging
import secrets
import socket
import threading
from collections.abc import Awaitable, Mapping, Sequence

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, PlainTextResponse
from pydantic import BaseModel, ConfigDict, Field

from miles.fault_tolerance.cells import Cell, CellOwner, CellSource, FaultKind
from miles.tracking import tracking

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class MetadataPatch(_Body):
    resource_version: str | None = Field(None, alias="resourceVersion")


class SpecPatch(_Body):
    suspend: bool


class CellPatch(_Body):
    """{"spec": {"suspend": true}}; with metadata.resourceVersion the patch is refused when the cell has changed since."""

    spec: SpecPatch
    metadata: MetadataPatch = MetadataPatch()


class Fault(_Body):
    """The resourceVersion that the caller saw is required: a fault must not hit a cell in another state than was meant."""

    kind: FaultKind
    resource_version: str = Field(alias="resourceVersion")


class CellList(_Body):
    items: list[Cell]


class Desk:
    """What the routes need: the cells' owners, and the driver's loop, on which every action runs."""

    def __init__(self, owner: CellOwner, shown: Sequence[CellSource], loop: asyncio.AbstractEventLoop) -> None:
        self.owner = owner
        self.shown = shown
        self.loop = loop

    def cells(self) -> list[Cell]:
        return [cell for source in (self.owner, *self.shown) for cell in source.cells()]

    def find(self, name: str, resource_version: str | None = None) -> Cell:
        """A view of a cell. Answers 404 for an unknown one, 409 when the caller's view is stale."""
        cell = next((cell for cell in self.cells() if cell.name == name), None)
        if cell is None:
            raise HTTPException(404, f"no cell {name!r}; there are {', '.join(cell.name for cell in self.cells()) or 'none'}")
        if resource_version not in (None, cell.metadata.resource_version):
            detail = f"{name} is at resourceVersion {cell.metadata.resource_version}, you saw {resource_version}: look again"
            raise HTTPException(409, detail)
        return cell

    def find_owned(self, name: str, resource_version: str | None) -> CellOwner:
        """The owner of a cell that can be acted on; 422 for one that is only shown."""
        self.find(name, resource_version)
        if name not in [cell.name for cell in self.owner.cells()]:
            raise HTTPException(422, f"{name} cannot be suspended or broken from here, only looked at")
        return self.owner

    async def act(self, action: Awaitable[None], what: str) -> bool:
        """Run an action on the driver's loop. False: it goes on, but has not ended within ANSWER_SECONDS (a publish, a slow start)."""
        future = asyncio.run_coroutine_threadsafe(_as_coroutine(action), self.loop)
        future.add_done_callback(lambda done: _report(done.exception() if not done.cancelled() else None, what))
        waiting = asyncio.wrap_future(future)
        try:
            await asyncio.wait_for(asyncio.shield(waiting), ANSWER_SECONDS)
        except TimeoutError:
            waiting.add_done_callback(lambda late: late.cancelled() or late.exception())  # it is reported above
            return False
        except ValueError as error:
            raise HTTPException(422, str(error)) from error
        except (RuntimeError, OSError) as error:
            raise HTTPException(500, f"{what}: {type(error).__name__}: {error}") from error
        return True


async def _as_coroutine(action: Awaitable[None]) -> None:
    await action


def _report(error: BaseException | None, what: str) -> None:
    if error is not None:
        logger.warning("%s failed: %s: %s", what, type(error).__name__, error)


def build(desk: Desk, token: str) -> FastAPI:
    """The app: health is open, everything else asks for the bearer token."""

    def authorised(request: Request) -> None:
        given = request.headers.get("authorization", "").removeprefix("Bearer ")
        if not secrets.compare_digest(given.encode(), token.encode()):
            raise HTTPException(401, "send the header `Authorization: Bearer TOKEN`", headers={"WWW-Authenticate": "Bearer"})

    app = FastAPI(title="miles control API", version="1", description="Cells of a running job: engines and trainers.")
    guarded = APIRouter(dependencies=[Depends(authorised)])

    @app.get("/health")
    def health() -> dict[str, str]:
        """Whether the driver's process is there."""
        return {"status": "ok"}

    @guarded.get("/cells", response_model=CellList)
    def list_cells() -> CellList:
        """Every cell."""
        return CellList(items=desk.cells())

    @guarded.get("/cells/{name}", response_model=Cell)
    def get_cell(name: str) -> Cell:
        """One cell."""
        return desk.find(name)

    @guarded.patch("/cells/{name}", response_model=Cell)
    async def patch_cell(name: str, patch: CellPatch, response: Response) -> Cell:
        """Suspend or resume a cell. 202: accepted, and still going on; look again."""
        owner = desk.find_owned(name, patch.metadata.resource_version)
        verb, action = ("suspend", owner.suspend_cell) if patch.spec.suspend else ("resume", owner.resume_cell)
        if not await desk.act(action(name), f"{verb} {name}"):
            response.status_code = 202
        return desk.find(name)

    @guarded.post("/cells/{name}/inject-fault", response_model=Cell)
    async def inject_fault(name: str, fault: Fault, response: Response) -> Cell:
        """Break a cell, to test recovery. 409 when the caller's view of the cell is stale."""
        owner = desk.find_owned(name, fault.resource_version)
        if not await desk.act(owner.inject_fault(name, fault.kind), f"inject {fault.kind} into {name}"):
            response.status_code = 202
        return desk.find(name)

    @guarded.get("/metrics", response_class=PlainTextResponse)
    def metrics() -> str:
        """Cells and the last value of every metric, in Prometheus' text format."""
        return prometheus_text(desk.cells(), tracking.latest())

    app.include_router(guarded)
    app.add_exception_handler(KeyError, _no_such_cell)
    return app


async def _no_such_cell(request: Request, error: Exception) -> Response:
    return JSONResponse({"detail": f"no cell {error}"}, status_code=404)


def prometheus_text(cells: list[Cell], latest: Mapping[str, float]) -> str:
    """miles_cell_condition{cell,type} is 1 for True, 0 for False, -1 for Unknown; rollout/reward becomes miles_rollout_reward."""
    number = {"True": 1, "False": 0, "Unknown": -1}
    lines = ["# TYPE miles_cell_condition gauge"]
    for cell in cells:
        for condition in cell.status.conditions:
            labels = f'cell="{_label(cell.name)}",type="{condition.type}"'
            lines.append(f"miles_cell_condition{{{labels}}} {number[condition.status]}")
    lines.append("# TYPE miles_cell_weight_version gauge")
    lines += [
        f'miles_cell_weight_version{{cell="{_label(cell.name)}"}} {cell.status.weight_version}'
        for cell in cells
        if cell.status.weight_version is not None
    ]
    loads = [(_label(cell.name), cell.status.load) for cell in cells if cell.status.load is not None]
    lines.append("# TYPE miles_engine_requests gauge")
    for name, load in loads:
        lines += [f'miles_engine_requests{{cell="{name}",state="{state}"}} {getattr(load, state)}' for state in ("running", "waiting")]
    for counter in ("tokens", "tokens_cut"):
        lines.append(f"# TYPE miles_engine_{counter}_total counter")
        lines += [f'miles_engine_{counter}_total{{cell="{name}"}} {getattr(load, counter)}' for name, load in loads]
    for name, value in sorted(latest.items()):
        metric = "miles_" + "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in name)
        lines += [f"# TYPE {metric} gauge", f"{metric} {value}".replace("inf", "Inf").replace("nan", "NaN")]
    return "\n".join(lines) + "\n"


def _label(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


class ApiServer:
    """A running server. `url` and `token` are what a client needs."""

    def __init__(self, desk: Desk, host: str, port: int, token: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind((host, port))
        except OSError as error:
            self._socket.close()
            raise ValueError(f"--api-server-port {port}: cannot listen on {host}: {error.strerror}") from error
        self.token = token
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{self._socket.getsockname()[1]}"
        config = uvicorn.Config(build(desk, token), log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=2)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="api-server", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Idempotent; returns when the port is free again."""
        self._server.should_exit = True
        self._thread.join(10)
        self._socket.close()
