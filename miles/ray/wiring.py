"""Puts a run together and takes it apart: the specs of its workers, the launch, the shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import ray

from miles.config.run_config import RunConfig
from miles.fault_tolerance import api_server, mini_ft_controller
from miles.fault_tolerance.kill_points import reached
from miles.ray import run as runs
from miles.ray import who_waits
from miles.ray.checkpoints import Checkpoints, newest
from miles.ray.cluster import Cluster, check_cpus
from miles.ray.guard import RunGuard
from miles.ray.heartbeat import Heartbeat
from miles.ray.run import Run
from miles.ray.starting import Starting
from miles.ray.worker_manager import WorkerManager
from miles.ray.worker_spec import Limit, WorkerSpec
from miles.tracking import tracking, waits
from miles.train.random_place import PREFIX, place_of
from miles.types import Role

logger = logging.getLogger(__name__)

EXECUTOR = "executor"
ENGINES = {"embedded": "miles.engines.embedded.engine.EmbeddedEngine", "sglang": "miles.engines.sglang.engine.SGLangEngine"}
_MODEL_SETTINGS = ("hf_checkpoint", "ref_checkpoint", "critic_checkpoint", "teacher_checkpoint")
# glibc hands large blocks back at once; a training step then spends half its time on page faults.
_TRAINER_MALLOC = "glibc.malloc.mmap_threshold=8589934592:glibc.malloc.trim_threshold=17179869184"
_SLACK = 30.0  # seconds: a worker's own limit, which knows more, comes first


def check_machine(args: RunConfig) -> None:
    """Before anything is made. Raises ValueError where the workers would have far too few CPUs."""
    if not args.in_process:
        check_cpus(args.ray_address, _cpus_needed(args))


def launch(args: RunConfig) -> Run:
    """Start what workers live in, and the guard that ends it all whatever happens. Called from the driver's event loop."""
    since = time.monotonic()
    models = _RandomModels(args)
    try:
        cluster = None if args.in_process else Cluster(args.ray_address, _cpus_needed(args))
    except BaseException:
        models.stop()
        raise
    manager = WorkerManager(f"{args.run_dir}/logs", args.shutdown_timeout, args.log_level, cluster)
    run = Run(args, manager, RunGuard(), Checkpoints(args.checkpoint_dir, args.keep_checkpoints, args.keep_best_metric))
    run.checkpoints.reached = partial(reached, args)
    run.checkpoints.tell = tracking.tell_after
    runs.set_current(run)
    loop = asyncio.get_running_loop()
    logs = Path(args.run_dir) / "logs"
    tracking.set_who_waits(lambda: asyncio.run_coroutine_threadsafe(who_waits.report(manager, logs), loop).result(_SLACK))
    run.heartbeat = Heartbeat(logs, lambda with_stacks: who_waits.beats_here(manager, with_stacks), "driver")
    run.heartbeat.start()
    run.starting = Starting(manager, since)
    run.starting.begin()
    run.guard.install(lambda: _save_on_signal(run))
    run.keeper = loop.create_task(_keep(run), name="keeper of the run")
    run.resolved = {"device": _device(args, cluster), **models.paths()}
    if args.load is not None:
        run.resolved["load"] = str(newest(args.load))
    return run


async def shutdown_worker_manager(manager: WorkerManager | None) -> None:
    """End all workers and Ray, and give the signals back. None is fine; so is a second call."""
    if manager is None:
        return
    ending = runs.current_or_none()
    if ending is not None and ending.starting is not None:
        ending.starting.stop()
    if ending is not None and ending.heartbeat is not None:
        ending.heartbeat.stop()
        waits.keep(Path(ending.args.run_dir) / "logs")
    mini_ft_controller.stop()
    api_server.stop()
    await manager.shutdown()
    run = runs.current_or_none()
    if run is not None and run.manager is manager:
        run.guard.restore()
        runs.set_current(None)
        if run.keeper is not None and run.keeper is not asyncio.current_task():
            run.keeper.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await run.keeper


async def _keep(run: Run) -> None:
    """Waits for the loop's end, which cancels it: then whatever went wrong, everything is disposed before the loop closes."""
    try:
        await asyncio.Event().wait()
    finally:
        await shutdown_worker_manager(run.manager)


async def _save_on_signal(run: Run) -> str:
    """What a signal does between two trainings: save the last trained rollout, if that is asked for and not done."""
    if run.open_rollout is not None:
        await asyncio.Event().wait()  # the end of its training saves, and ends the run
    done = run.trained_through
    if not run.args.save_on_signal or run.save_all is None or done is None:
        return ""
    await run.save_all(done)
    return f"; rollout {done} is saved in {run.checkpoints.folder(done)}"


def engine_specs(args: RunConfig) -> list[WorkerSpec]:
    limits = dict.fromkeys(("pause", "resume", "abort", "abort_update"), Limit(args.control_timeout, "--control-timeout"))
    limits |= {
        "init": Limit(args.engine_start_timeout, "--engine-start-timeout"),
        "generate": _longest_request(args),
        "health": Limit(args.health_timeout, "--health-timeout"),
        "dispose": Limit(args.shutdown_timeout, "--shutdown-timeout"),
    }
    threads = {} if args.engine_threads is None and _uses_gpus(args) else {"OMP_NUM_THREADS": str(args.engine_threads or 1)}
    return [
        WorkerSpec(
            name=f"engine-{index}",
            cls=ENGINES[args.engine],
            kwargs={"args": args, "name": f"engine-{index}"} | ({"url": args.sglang_urls[index]} if args.sglang_urls else {}),
            kind="engine",
            num_cpus=args.cpus_per_engine,
            num_gpus=_gpus(args, args.gpus_per_engine),
            env={**threads, **_deterministic(args)},
            start=Limit(args.worker_start_timeout, "--worker-start-timeout"),
            limits=limits,
            default_limit=Limit(args.publish_timeout, "--publish-timeout"),
        )
        for index in range(args.num_engines)
    ]


def _longest_request(args: RunConfig) -> Limit:
    """The rollout side limits each sample itself, and an evaluation as a whole; this is for a worker that is beyond that."""
    if args.eval_data and args.eval_mode == "shared" and args.eval_timeout > args.sample_timeout:
        return Limit(args.eval_timeout + _SLACK, "--eval-timeout")
    return Limit(args.sample_timeout + _SLACK, "--sample-timeout")


def trainer_specs(args: RunConfig, role: Role, store: Any) -> list[WorkerSpec]:
    publish = Limit(args.publish_timeout, "--publish-timeout")
    limits = dict.fromkeys(("plan_publish", "send_bucket", "end_publish", "abort_publish"), publish)
    limits["dispose"] = Limit(args.shutdown_timeout, "--shutdown-timeout")
    threads = {} if args.trainer_threads is None and _uses_gpus(args) else {"OMP_NUM_THREADS": str(args.trainer_threads or 1)}
    return [
        WorkerSpec(
            name=f"{role}-{rank}",
            cls="miles.train.trainer.Trainer",
            kwargs={"args": args, "role": role, "rank": rank, "world_size": args.num_trainers, "store": store},
            kind=role,
            apart=True,
            num_cpus=args.cpus_per_trainer,
            num_gpus=_gpus(args, args.gpus_per_trainer),
            env={**threads, **_deterministic(args), "GLIBC_TUNABLES": _TRAINER_MALLOC},
            start=Limit(args.worker_start_timeout, "--worker-start-timeout"),
            limits=limits,
            default_limit=Limit(args.train_timeout, "--train-timeout"),
        )
        for rank in range(args.num_trainers)
    ]


def executor_spec(args: RunConfig, store: Any) -> WorkerSpec:
    limits = {
        "get": Limit(args.generate_timeout + _SLACK, "--generate-timeout"),
        "quiet": Limit(args.generate_timeout + _SLACK, "--generate-timeout"),
        "save": Limit(args.generate_timeout + _SLACK, "--generate-timeout"),
        "eval": Limit(args.eval_timeout + _SLACK, "--eval-timeout"),
        "dispose": Limit(args.shutdown_timeout, "--shutdown-timeout"),
    }
    return WorkerSpec(
        name=EXECUTOR,
        cls="miles.rollout.rollout_executor.RolloutExecutor",
        kwargs={"args": args, "store": store},
        kind="executor",
        env={"OMP_NUM_THREADS": "1"},
        start=Limit(args.worker_start_timeout, "--worker-start-timeout"),
        limits=limits,
    )


def all_specs(run: Run) -> list[WorkerSpec]:
    """Every worker that takes a slot, trainers first, so that rank 0 lies on the first GPU."""
    args = run.worker_args()
    roles: list[Role] = ["actor", "critic"] if args.use_critic else ["actor"]
    trainers = [spec for role in roles for spec in trainer_specs(args, role, run.manager.store)]
    return [*trainers, *engine_specs(args)]


def _cpus_needed(args: RunConfig) -> float:
    ranks = args.num_trainers * (2 if args.use_critic else 1)
    return ranks * args.cpus_per_trainer + args.num_engines * args.cpus_per_engine


def _deterministic(args: RunConfig) -> dict[str, str]:
    """What cuBLAS must know before it is loaded."""
    return {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if args.deterministic else {}


def _uses_gpus(args: RunConfig) -> bool:
    return args.device == "cuda"


def _gpus(args: RunConfig, share: float) -> float:
    """Colocated workers take turns on one GPU, so each asks Ray for at most half of it."""
    if not _uses_gpus(args):
        return 0.0
    return min(share, 0.5) if args.colocate else share


def _device(args: RunConfig, cluster: Cluster | None) -> str:
    """auto, resolved for all workers alike. In one process the workers see for themselves."""
    if args.device != "auto" or cluster is None:
        return args.device
    return "cuda" if ray.cluster_resources().get("GPU", 0) > 0 else "cpu"


class _RandomModels:
    """Makes the random models that settings name, beside the start of Ray; in a process of its own, as the driver has no torch."""

    def __init__(self, args: RunConfig) -> None:
        self._making: dict[str, subprocess.Popen[str]] = {}
        self._models = {name: value for name in _MODEL_SETTINGS if (value := args.__dict__[name]) and value.startswith(PREFIX)}
        self._places = {model: place_of(model, args.seed) for model in self._models.values()}
        for model in (model for model, place in self._places.items() if not place.is_dir()):
            command = [sys.executable, "-m", "miles.train.random_model", model, str(args.seed)]
            self._making[model] = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def paths(self) -> dict[str, str]:
        """Setting -> directory.

        Raises:
            ValueError: no such model, or it could not be made.
        """
        for model, process in self._making.items():
            _, error = process.communicate()
            if process.returncode:
                raise ValueError(f"the model {model} could not be made: {error.strip().splitlines()[-1]}")
        return {name: str(self._places[model]) for name, model in self._models.items()}

    def stop(self) -> None:
        for process in self._making.values():
            process.kill()
            process.communicate()
