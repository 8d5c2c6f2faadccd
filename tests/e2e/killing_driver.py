"""The driver, with engines that are killed at chosen moments: while they generate, while they are paused, in the middle of a publish.

After each death the run is held before its next training until the engine has been started again and every engine serves.
"""

import asyncio
import signal
import sys

import train_async
from miles.ray import run as runs
from miles.ray import weight_update
from miles.ray.rollout.engine_cells import EngineCells
from miles.ray.rollout.inference_controller import InferenceController
from miles.ray.train.train_group import TrainGroup

LIMIT = 180.0  # seconds that a recovery may take on a machine with much to do
Receivers = weight_update._Receivers
pause, restart, call, train = InferenceController.pause_engines, EngineCells.restart, Receivers.call, TrainGroup.train

TAKES_WEIGHTS = "end_update"  # of a publish that is staged, as every one but the first is
ONE_ENGINE = sys.argv[sys.argv.index("--num-engines") + 1] == "1"
due = {"generation": 0} | ({} if ONE_ENGINE else {"pause": 1, "publish": 2})  # a moment, and the rollout after whose training somebody dies
dead: list[str] = []
back: list[str] = []  # started again, and not yet said
controllers: list[InferenceController] = []
trained = [-1]


def tell(text):
    print(text, file=sys.stderr, flush=True)


async def maybe_kill(moment, engine):
    if due.get(moment) == trained[-1]:
        del due[moment]
        dead.append(engine.worker_name)
        await runs.current().manager.signal(engine.worker_name, signal.SIGKILL)
        tell(f"killed {engine.worker_name} in {moment}")


async def killing_pause(controller):
    controllers[:] = [controller]
    engines = await pause(controller)
    await maybe_kill("pause", engines[-1])
    return engines


async def noted_restart(cells, cell):
    await restart(cells, cell)
    if cell.name in dead:
        dead.remove(cell.name)
        back.append(cell.name)


async def killing_call(receivers, method, *arguments):
    if method == TAKES_WEIGHTS:
        await maybe_kill("publish", receivers._engines[0])
    return await call(receivers, method, *arguments)


async def killing_train(group, *arguments):
    await all_serve()
    result = await train(group, *arguments)
    trained.append(arguments[0])
    await maybe_kill("generation", controllers[0].engines[0])
    return result


async def all_serve():
    """Until everybody who died is back; what the engines serve then is said."""
    (controller,) = controllers
    async with asyncio.timeout(LIMIT):
        while dead or any(cell.condition("Serving").status != "True" for cell in controller.cells()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    run = runs.current()
    versions = {cell.status.weight_version for cell in controller.cells()}
    while back:
        tell(f"back: {back.pop()}, current: {versions == {weight_update.version_after(run.args, run.published)}}")


InferenceController.pause_engines = killing_pause
EngineCells.restart = noted_restart
Receivers.call = killing_call
TrainGroup.train = killing_train

if __name__ == "__main__":
    train_async.main(sys.argv[1:])
