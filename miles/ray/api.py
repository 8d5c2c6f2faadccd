"""The control API of a run, where it is asked for."""

from __future__ import annotations

from collections.abc import Mapping

from miles.config.run_config import RunConfig
from miles.ray.rollout.inference_controller import InferenceController
from miles.ray.train.train_group import TrainGroup


def maybe_start_api_server(args: RunConfig, trainer_models: Mapping[str, TrainGroup], inference_controller: InferenceController) -> None:
    """Off when `api_server_port` is 0."""
    if args.api_server_port:
        raise ValueError("--api-server-port: the control API is not part of this version")
