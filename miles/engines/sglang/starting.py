"""The start of a server: its process, and whose turn it is. Servers that share a GPU start one after another.

A server sizes its KV cache by the memory that is free before and after it loads the model. One that starts meanwhile on the same GPU
takes of that, and the first finds less than nothing left.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from filelock import AsyncFileLock, Timeout

from miles.config.run_config import RunConfig
from miles.engines.embedded.model import pick_device
from miles.engines.sglang.checkpoint import Checkpoint
from miles.engines.sglang.known_options import check_options
from miles.engines.sglang.options import cpu_environment, server_options
from miles.engines.sglang.server import Server, server_version
from miles.engines.sglang.versions import Version

logger = logging.getLogger(__name__)

LOOK_SECONDS = 0.25


async def spawn(args: RunConfig, model: Checkpoint, name: str) -> Server:
    """Raises ValueError for an interpreter or options that cannot work."""
    python = args.sglang_python or sys.executable
    Version.of(await asyncio.to_thread(server_version, python))
    await asyncio.to_thread(check_options, python, args.sglang)
    device = pick_device(args.device).type
    options = server_options(args, device=device, has_tokenizer=model.stopping.tokenizer is not None)
    environment = cpu_environment(options, args.engine_threads or 1) if device == "cpu" else {}
    if args.engine_threads:
        environment["OMP_NUM_THREADS"] = str(args.engine_threads)
    return Server(python, options, Path(args.run_dir) / "logs" / f"{name}-sglang.log", environment)


@asynccontextmanager
async def turn(args: RunConfig, seconds: float) -> AsyncIterator[None]:
    """Hold this process's GPU among those who start servers on it, if it is shared; whoever dies lets go of it.

    Raises:
        TimeoutError: others held it for `seconds`.
    """
    if args.gpus_per_engine >= 1 or pick_device(args.device).type != "cuda":
        yield
        return
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0")
    lock = AsyncFileLock(Path(tempfile.gettempdir()) / f"miles-{os.getuid()}-gpu-{gpu}.lock", timeout=seconds, poll_interval=LOOK_SECONDS)
    try:
        await lock.acquire(blocking=False)
    except Timeout:
        logger.info("waiting for another engine to start on GPU %s", gpu)
        try:
            await lock.acquire()
        except Timeout:
            limit = f"--engine-start-timeout {args.engine_start_timeout:g} s"
            raise TimeoutError(f"GPU {gpu}: other engines were starting on it until {limit} was over ({lock.lock_file} is held)") from None
    try:
        yield
    finally:
        await lock.release()
