"""What every benchmark reports beside its figures: the machine, medians with their spread, a table, a JSON file."""

from __future__ import annotations

import json
import os
import platform
import statistics
from collections.abc import Sequence
from typing import Any

import torch
import transformers


def machine(device: str) -> dict[str, Any]:
    return {
        "device": torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()}, {os.cpu_count()} cores",
        "load": f"{os.getloadavg()[0]:.1f}",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def summary(values: Sequence[float]) -> dict[str, Any]:
    return {"median": statistics.median(values), "least": min(values), "most": max(values), "all": list(values)}


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def write(path: str | None, result: dict[str, Any]) -> None:
    if path:
        with open(path, "w") as file:
            json.dump(result, file, indent=1)
