"""The control API's beginning and end. Its routes are in api_app.py, loaded only when asked for: a web framework takes its time."""

import asyncio
import logging
import secrets
from collections.abc import Mapping
from typing import Protocol

from miles.config.run_config import RunConfig
from miles.fault_tolerance.cells import CellOwner, CellSource
from miles.fault_tolerance.token import token_path, write_token
from miles.plugins import load

logger = logging.getLogger(__name__)


class Server(Protocol):
    """A running server."""

    url: str

    def close(self) -> None: ...


_running: Server | None = None


def maybe_start_api_server(args: RunConfig, trainer_models: Mapping[str, CellSource], inference_controller: CellOwner) -> Server | None:
    """Start the control API unless its port is 0. Called by the driver from its event loop, once per run; `stop` ends it.

    The token is `--api-server-token`, or a random one; either lies in the run folder, in a file that only its owner can read.
    """
    global _running
    if args.api_server_port == 0:
        return None
    stop()
    token = args.api_server_token or secrets.token_urlsafe(24)
    write_token(token_path(args.run_dir), token)
    desk = load("miles.fault_tolerance.api_app.Desk")(inference_controller, list(trainer_models.values()), asyncio.get_running_loop())
    _running = server = load("miles.fault_tolerance.api_app.ApiServer")(desk, args.api_server_host, args.api_server_port, token)
    logger.info("control API on %s, its page on %s/docs, its token in %s", server.url, server.url, token_path(args.run_dir))
    return server


def stop() -> None:
    """End the server that `maybe_start_api_server` started. Idempotent."""
    global _running
    ending, _running = _running, None
    if ending is not None:
        ending.close()
