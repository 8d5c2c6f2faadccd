"""Rewards that go wrong."""

import os


def raises(sample):
    raise RuntimeError(f"the judge is out of its mind about {sample.label!r}")


def dies(sample):
    os._exit(7)
