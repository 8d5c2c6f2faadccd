"""Seeds that depend on what is sampled, not on when or where."""

from __future__ import annotations

import hashlib


def sample_seed(run_seed: int, group_index: int, place: int, attempt: int = 0, turn: int = 0) -> int:
    """Seed of one completion, 63 bits: equal on every machine, process and Python version.

    Args:
        run_seed: `args.seed`.
        group_index: draw of the prompt over the whole run.
        place: the sample's place among its siblings.
        attempt: how often the draw was started again.
        turn: model turn within the sample.
    """
    key = f"{run_seed}/{group_index}/{place}/{attempt}/{turn}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 1
