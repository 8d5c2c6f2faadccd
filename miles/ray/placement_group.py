"""Door: what a driver brings up, and the publish."""

from miles.fault_tolerance.api_server import maybe_start_api_server
from miles.ray.rollout.components import create_rollout_components
from miles.ray.train.models import create_training_models
from miles.ray.weight_update import update_weights

__all__ = ["create_rollout_components", "create_training_models", "maybe_start_api_server", "update_weights"]
