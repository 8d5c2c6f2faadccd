"""Reward functions as users write them, good and bad."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from fractions import Fraction
from pathlib import Path

import numpy as np

KEPT = []


def label_in_response(sample):
    return float(str(sample.label) in sample.response)


async def label_in_response_async(sample):
    await asyncio.sleep(0)
    return float(str(sample.label) in sample.response)


class Scaled:
    def __init__(self, args):
        self.scale = args.reward_timeout

    def __call__(self, sample):
        return self.scale


class ScaledAsync(Scaled):
    async def __call__(self, sample):
        return self.scale


class TwoAtOnce:
    concurrency = 2

    def __init__(self, args):
        self.inside = 0

    async def __call__(self, sample):
        """How many calls are under way, this one with them."""
        self.inside += 1
        for _ in range(5):
            await asyncio.sleep(0)
        most = self.inside
        self.inside -= 1
        return most


def table(sample):
    return {"reward": 0.5, "format": 1, "length": len(sample.response_ids)}


def nothing(sample):
    return None


def raises(sample):
    return helper_of_raises(sample)


def helper_of_raises(sample):
    raise KeyError("the user's own mistake")


async def raises_async(sample):
    return helper_of_raises(sample)


def exits(sample):
    sys.exit(3)


def forks_and_forgets(sample):
    """Its child goes on in the worker's loop."""
    return float(os.fork() != 0)


class Mute(Exception):
    def __str__(self):
        raise RuntimeError("no text")


def mute(sample):
    raise Mute


class Unlike(BaseException):
    pass


def unlike(sample):
    raise Unlike("nothing that one would catch")


async def unlike_async(sample):
    raise Unlike("nothing that one would catch")


def beyond_float32(sample):
    return 1e300


def digits(sample):
    return 10**400


def generator(sample):
    yield 1.0


async def async_generator(sample):
    yield 1.0


def text(sample):
    return "good"


def text_of_a_number(sample):
    return "0.5"


def text_in_details(sample):
    return {"reward": 1, "judged": "0.5"}


def infinite(sample):
    return -np.inf


def array(sample):
    return np.ones(2)


def numbers(sample):
    """Of every kind that is one, as told."""
    return {
        "bool": True,
        "numpy": np.float32(1),
        "numpy int": np.int64(1),
        "numpy bool": np.bool_(True),
        "numpy scalar array": np.array(1.0),
        "fraction": Fraction(1),
    }[sample.response]


def leaks(sample):
    """16 MB at each call, that stay."""
    KEPT.append(b"x" * (16 << 20))
    return 1.0


def nan(sample):
    return float("nan")


def as_told(sample):
    """Does what the response says."""
    match sample.response:
        case "hang":
            time.sleep(3600)
        case "spin":
            while True:
                pass
        case "hold the interpreter":
            re.match(r"(a+)+$", "a" * 60 + "b")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "eat":
            return float(len(bytearray(8 << 30)))
        case "raise":
            raise ValueError("as told")
        case "die once":
            marker = Path(sample.metadata["marker"])
            if not marker.exists():
                marker.touch()
                os._exit(7)
        case "leave a child":
            child = subprocess.Popen(["sleep", "3600"])
            Path(sample.metadata["marker"]).write_text(str(child.pid))
            time.sleep(3600)
    return 1.0


async def hang_async(sample):
    await asyncio.sleep(3600)


async def ignore_cancellation(sample):
    while True:
        try:
            await asyncio.sleep(0.5)
            return 1.0
        except asyncio.CancelledError:
            continue


def pid(sample):
    return os.getpid()
