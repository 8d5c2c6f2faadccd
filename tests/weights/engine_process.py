"""Engines in processes of their own: each holds parameters and a real WeightLoader, and does what it is told."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch

from miles.config.run_config import RunConfig
from miles.weights.buckets import NamedShape
from miles.weights.receiver import WeightLoader
from miles.weights.sender import WeightPublisher

SPAWN = multiprocessing.get_context("spawn")


def serve(connection: Any) -> None:
    """Child: ("make", shapes, timeout, device) builds parameters and loader; ("values",) gives copies; else a method of the loader."""
    torch.set_num_threads(1)
    loader, parameters = WeightLoader({"none": torch.zeros(1)}), {}
    while True:
        try:
            method, *arguments = connection.recv()
        except EOFError:
            return
        try:
            result = None
            if method == "make":
                loader.dispose()
                shapes, timeout, *device = arguments
                where = device[0] if device else "cpu"
                parameters = {name: torch.zeros(tuple(shape), dtype=dtype, device=where) for name, dtype, shape in shapes}
                loader = WeightLoader(parameters, timeout)
            elif method == "values":
                result = {name: tensor.cpu().clone() for name, tensor in parameters.items()}
            else:
                result = getattr(loader, method)(*arguments)
            connection.send((None, result))
        except Exception as error:
            connection.send((error, None))


class EngineProcess:
    def __init__(self) -> None:
        self.connection, other = SPAWN.Pipe()
        self.process = SPAWN.Process(target=serve, args=(other,), daemon=True)
        self.process.start()
        other.close()

    def call(self, method: str, *arguments: Any) -> Any:
        self.connection.send((method, *arguments))
        error, result = self.connection.recv()
        if error is not None:
            raise error
        return result

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        self.connection.close()


@contextmanager
def engines(count: int) -> Iterator[list[EngineProcess]]:
    processes = [EngineProcess() for _ in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()


def shapes_of(weights: dict[str, torch.Tensor]) -> list[NamedShape]:
    return [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights.items()]


def publish(
    publisher: WeightPublisher, weights: dict[str, torch.Tensor], receivers: list[EngineProcess], version: int
) -> list[dict[str, str]]:
    """One whole publish as the driver does it. Returns the sender's and each engine's checksums."""
    plan = publisher.plan(version, num_receivers=len(receivers))
    with ThreadPoolExecutor(len(receivers) + 1) as pool:
        for begun in [pool.submit(engine.call, "begin", plan, rank) for rank, engine in enumerate(receivers)]:
            begun.result()
        for index, bucket in enumerate(plan.buckets):
            sent = pool.submit(publisher.send_bucket, index, [(spec.name, weights[spec.name]) for spec in bucket])
            if not plan.concurrent:
                sent.result()
            for received in [pool.submit(engine.call, "receive", index) for engine in receivers]:
                received.result()
            sent.result()
        checksums = publisher.checksums()
        publisher.close()
        return [checksums, *pool.map(lambda engine: engine.call("finish"), receivers)]


def settings(**values: Any) -> RunConfig:
    return RunConfig(**{"weight_bucket_mb": 1, "publish_timeout": 20.0, **values})
