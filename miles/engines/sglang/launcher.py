"""Starts one SGLang server. Run as a file by the interpreter that has sglang, with SGLang's own flags; needs no installed miles.

    /path/to/venv/bin/python miles/engines/sglang/launcher.py --model-path DIR --port 30000 ...

Beside starting the server it does three things:

- On a CPU, where sglang's compiled kernels and a CUDA torchvision are not there, it lets sglang be imported without them. The
  CPU path imports names from both and calls none.
- It makes this package importable in the server by its folder alone, as the server loads weights through `loader.py`.
- With --miles-watch-stdin FOLDER the server, and all it started, ends as soon as the other end of its standard input is gone.

Processes that the server spawns run this module again, as `__mp_main__`.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import re
import shutil
import signal
import sys
import threading
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

LOADER = "miles.engines.sglang.loader.load"
WATCH = "--miles-watch-stdin"
PACKAGE = Path(__file__).resolve().parents[2]


def make_importable(package: Path) -> None:
    """`import miles.x` from its folder, without the rest of the environment that the folder is part of."""
    if "miles" in sys.modules:
        return
    spec = importlib.util.spec_from_file_location("miles", package / "__init__.py", submodule_search_locations=[str(package)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["miles"] = module
    spec.loader.exec_module(module)


def prepare_cpu() -> None:
    """Let sglang be imported where neither its kernels nor torchvision's operators exist."""
    if importlib.util.find_spec("sgl_kernel") is None:
        for name in ("sgl_kernel", "sgl_kernel.mamba"):
            sys.modules[name] = _placeholder(name)
    if importlib.util.find_spec("torchvision") is not None and not importlib.metadata.version("torchvision").endswith("+cpu"):
        operators = torch.library.Library("torchvision", "FRAGMENT")
        _kept.append(operators)
        for schema in (
            "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
            "qnms(Tensor dets, Tensor scores, float t) -> Tensor",
        ):
            operators.define(schema)


def _placeholder(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None, is_package=True)
    module.__path__ = []

    def missing(attribute: str) -> Any:
        if attribute.startswith("__"):
            raise AttributeError(attribute)

        def call(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"{name}.{attribute} does not exist on a CPU")

        return call

    module.__getattr__ = missing  # type: ignore[method-assign]
    return module


def end_with_parent(scratch: str) -> None:
    """End this process group when standard input is closed: whoever started the server is gone, however it ended.

    Args:
        scratch: a folder to remove then.
    """

    def wait() -> None:
        while os.read(0, 1):
            pass
        end_group(os.getpgrp())
        shutil.rmtree(scratch, ignore_errors=True)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=wait, name="watch of the parent", daemon=True).start()


def end_group(group: int) -> None:
    """Kill what is in a process group, but this process and Python's resource tracker: that removes what the killed leave behind."""
    members = [process for process in Path("/proc").glob("[0-9]*") if _group_of(process) == group and int(process.name) != os.getpid()]
    for path in {path for process in members for path in mapped_files(process)}:
        path.unlink(missing_ok=True)
    for process in members:
        with contextlib.suppress(OSError):
            if b"resource_tracker" not in (process / "cmdline").read_bytes():
                os.kill(int(process.name), signal.SIGKILL)


def mapped_files(process: Path) -> set[Path]:
    """Files of SGLang's in shared memory that a process has mapped; `process` is its folder in /proc."""
    try:
        return {Path(path) for path in re.findall(r"/dev/shm/sglang\S*", (process / "maps").read_text())}
    except OSError:  # it ended just now
        return set()


def _group_of(process: Path) -> int | None:
    try:
        return os.getpgid(int(process.name))
    except OSError:
        return None


_kept: list[Any] = []  # operator schemas live as long as their library object

if __name__ in ("__main__", "__mp_main__"):
    make_importable(PACKAGE)
    if torch.version.cuda is None:
        prepare_cpu()

if __name__ == "__main__":
    if WATCH in sys.argv:
        place = sys.argv.index(WATCH)
        end_with_parent(sys.argv[place + 1])
        del sys.argv[place : place + 2]
    from sglang.launch_server import run_server
    from sglang.srt.server_args import prepare_server_args

    run_server(prepare_server_args([*sys.argv[1:], "--custom-weight-loader", LOADER]))
