"""The Ray under a run: a small local one that ends with it, or a running cluster that it joins."""

from __future__ import annotations

import logging
import math
import os
import shutil
import socket
import sys
import sysconfig
from pathlib import Path

import psutil
import ray

from miles.ray import processes
from miles.ray.temp_folders import TempFolder, remove_stale
from miles.ray.warden import Warden

logger = logging.getLogger(__name__)

_MAX_STORE_BYTES = 2 * 2**30
_MIN_STORE_BYTES = 128 * 2**20
_MAX_SHARING = 4
_STARTS = 3
"""How often a local Ray is started: it gives itself 30 seconds, which no setting changes and a busy machine can need twice."""


def check_cpus(address: str | None, needed: float) -> None:
    """Raises ValueError where a local Ray, as the same arguments make it, would have far too few."""
    cpus, wanted = os.cpu_count() or 1, math.ceil(needed)
    if wanted > _MAX_SHARING * cpus and not _joined(address):
        raise ValueError(
            f"not enough CPUs: the workers ask for {wanted} and this machine has {cpus}; more than {_MAX_SHARING} that share one only "
            "wait for each other. Lower --num-trainers or --num-engines, or --cpus-per-trainer and --cpus-per-engine, or join a larger "
            "cluster with --ray-address"
        )


def _joined(address: str | None) -> str | None:
    return address or os.environ.get("RAY_ADDRESS")


class Cluster:
    """Joins or starts Ray in the constructor; `leave` ends what was started."""

    def __init__(self, address: str | None, cpus_needed: float) -> None:
        """`address` as given by the user, None to start a local Ray with room for `cpus_needed`."""
        self.address = _joined(address)
        self.namespace = f"miles-{os.getpid()}-{os.urandom(4).hex()}"
        self._temp: TempFolder | None = None
        self._warden: Warden | None = None
        self._started: set[psutil.Process] = set()  # with a local Ray
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "1")
        os.environ.setdefault("RAY_worker_niceness", "0")  # not behind everything else that runs on a shared machine
        try:
            self._join() if self.address else self._start(cpus_needed)
        except BaseException:
            self.leave()
            raise

    def _join(self) -> None:
        try:
            _knock(self.address or "")  # Ray itself tries for minutes without a word
            ray.init(address=self.address, namespace=self.namespace, log_to_driver=False, logging_level=logging.ERROR)
        except OSError as error:
            raise ValueError(f"--ray-address: no Ray cluster answers at {self.address!r}: {error}{_hint(error)}") from None
        logger.info("joined the Ray cluster at %s: %s", self.address, _in_words(ray.cluster_resources()))

    def _start(self, cpus_needed: float) -> None:
        cpus, wanted = os.cpu_count() or 1, math.ceil(cpus_needed)
        if wanted > cpus:
            logger.warning("the workers ask for %d CPUs and this machine has %d: they will share", wanted, cpus)
        remove_stale()
        for left in reversed(range(_STARTS)):
            try:
                self._start_once(max(cpus, wanted))
                break
            except Exception as error:  # Ray raises no class of its own
                if not left or "timed out during startup" not in str(error):
                    raise
                logger.warning("Ray did not start within its 30 seconds; this machine is busy. Trying again, %d more times", left)
                self.leave()
        logger.info("started a local Ray: %s", _in_words(ray.cluster_resources()))

    def _start_once(self, cpus: int) -> None:
        self._temp = TempFolder()
        self._warden = Warden(self._temp.path)
        before = processes.children()
        try:
            with processes.in_groups_of_their_own():
                ray.init(
                    namespace=self.namespace,
                    num_cpus=cpus,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=_store_bytes(),
                    _temp_dir=self._temp.path,
                    # Workers have environments of their own, so processes started ahead would never be used.
                    _system_config={"prestart_worker_first_driver": False, "enable_worker_prestart": False},
                )
        finally:
            self._started = processes.children() - before

    def env(self) -> dict[str, str]:
        """What every worker process needs to find the same code as this one."""
        own = set(sysconfig.get_paths().values())  # the interpreter finds these itself
        paths = [str(Path.cwd()), *(path for path in sys.path if path and Path(path).is_dir() and path not in own)]
        return {"PYTHONPATH": os.pathsep.join(dict.fromkeys(paths))}

    def leave(self) -> None:
        """Disconnect; a local Ray is ended, with every process that came with it. Idempotent."""
        if self._warden:
            self._warden.dismiss()
        ours = processes.with_descendants(self._started)
        ray.shutdown()
        if self._temp:
            for name in processes.end(ours):
                logger.debug("ended a process that outlived Ray: %s", name)
            self._temp.remove()
            self._temp = None
        self._started = set()


def _hint(error: OSError) -> str:
    """Ray's own ConnectionError comes also when a cluster wants a token, which Ray takes along only where it is told to."""
    secret = type(error) is ConnectionError and "RAY_AUTH_MODE" not in os.environ
    return ". Something listens there: if the cluster wants a token, set RAY_AUTH_MODE=token (and RAY_AUTH_TOKEN)" if secret else ""


def _knock(address: str) -> None:
    """Raises OSError when nothing listens at `address`, [ray://]host:port. Other forms, such as auto, are Ray's to resolve."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()


def _store_bytes() -> int:
    """A share of the free memory, within what shared memory has."""
    free = psutil.virtual_memory().available // 8
    if Path("/dev/shm").is_dir():
        free = min(free, int(shutil.disk_usage("/dev/shm").free * 0.6))
    return max(_MIN_STORE_BYTES, min(_MAX_STORE_BYTES, free))


def _in_words(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs, {resources.get('GPU', 0):g} GPUs"
