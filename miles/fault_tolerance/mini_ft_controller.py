"""The small healer's beginning and end. What it decides and does is in healer.py, loaded only when it is asked for."""

from typing import Protocol

from miles.config.run_config import RunConfig
from miles.fault_tolerance.token import read_token, token_path
from miles.plugins import load


class Running(Protocol):
    """A started healer."""

    def stop(self) -> None: ...


_running: Running | None = None


def maybe_start_mini_ft_controller(args: RunConfig) -> Running | None:
    """Start the healer when it is asked for. Called by the driver after the control API is up; `stop` ends it."""
    global _running
    if not args.mini_ft_controller:
        return None
    stop()
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(args.api_server_host, args.api_server_host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{args.api_server_port}"
    healer = load("miles.fault_tolerance.healer.MiniFtController")(args, url, read_token(token_path(args.run_dir)))
    healer.start()
    _running = healer
    return _running


def stop() -> None:
    """End the healer that `maybe_start_mini_ft_controller` started. Idempotent."""
    global _running
    ending, _running = _running, None
    if ending is not None:
        ending.stop()
