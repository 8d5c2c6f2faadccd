"""Small plain classes to host."""

import asyncio
import gc
import os
import sys
import threading
import time

import numpy as np

from miles.types import ObjectRef


class UserError(ValueError):
    pass


class Untravelling(Exception):
    def __init__(self, a: int, b: int) -> None:
        super().__init__(f"{a}/{b}")


class Plain:
    def __init__(self, store=None, greeting="hello"):
        if greeting == "raise":
            raise UserError("no such greeting")
        self.store, self.greeting = store, greeting
        self.built_on = threading.get_ident()
        print(f"built, {greeting}", flush=True)

    def where(self):
        return os.getpid(), threading.get_ident() == self.built_on, os.environ.get("OMP_NUM_THREADS")

    def collections(self):
        return gc.isenabled(), gc.get_freeze_count()

    def busy_here_in_compute(self, seconds):
        time.sleep(seconds)
        return seconds

    async def wait(self, seconds):
        await asyncio.sleep(seconds)
        return "waited"

    async def quick(self):
        return "quick"

    def fail(self, text):
        print("about to fail", file=sys.stderr, flush=True)
        raise UserError(text)

    def fail_badly(self):
        raise Untravelling(1, 2)

    async def leave(self):
        sys.exit("enough")

    def die(self):
        print("last words", flush=True)
        os._exit(3)

    def put(self, size):
        return self.store.put(np.arange(size, dtype=np.float32))

    def total(self, ref: ObjectRef):
        array = self.store.get(ref)
        return float(array.sum()), bool(array.flags.writeable)

    async def ask(self, other, method, *args):
        return await getattr(other, method)(*args)

    async def keep(self, other):
        self.kept = other

    async def ask_kept(self, method):
        return await getattr(self.kept, method)()

    def spawn(self):
        import subprocess

        return subprocess.Popen(["sleep", "600"]).pid

    async def dispose(self):
        print("disposed", flush=True)
