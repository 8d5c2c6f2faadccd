"""Plugs for the runs: rewards that go wrong, an evaluator."""

import os
import threading
from pathlib import Path


def raises(sample):
    raise RuntimeError(f"the judge is out of its mind about {sample.label!r}")


def hangs(sample):
    threading.Event().wait()


def dies(sample):
    os._exit(7)


async def count_files(hf_dir, rollout_id):
    return {"files": len(list(Path(hf_dir).iterdir()))}
