"""Writes the sums: train.jsonl and held_out.jsonl, drawn with a seed. No held-out pair is trained on, in either order.

The model gets one solved example and the sum, as plain text: "2 + 3 = 5\\n13 + 9 =".
"""

import argparse
import json
import random
from pathlib import Path

EXAMPLE = (2, 3)


def prompt(a: int, b: int) -> str:
    x, y = EXAMPLE
    return f"{x} + {y} = {x + y}\n{a} + {b} ="


def split(largest: int, num_held_out: int, seed: int) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """(train, held out): pairs of 1 .. largest. Held-out pairs come in one order and their mirror images nowhere."""
    draw = random.Random(seed)
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(a, largest + 1) if (a, b) != EXAMPLE]
    if num_held_out >= len(pairs):
        raise ValueError(f"only {len(pairs)} different pairs up to {largest}, cannot hold out {num_held_out}")
    draw.shuffle(pairs)
    held_out = [draw.choice([(a, b), (b, a)]) for a, b in pairs[:num_held_out]]
    train = [order for a, b in pairs[num_held_out:] for order in ([(a, b), (b, a)] if a != b else [(a, b)])]
    draw.shuffle(train)
    return train, held_out


def write(path: Path, pairs: list[tuple[int, int]]) -> None:
    rows = [json.dumps({"prompt": prompt(a, b), "label": str(a + b)}) for a, b in pairs]
    path.write_text("\n".join(rows) + "\n")


def make(directory: Path, largest: int = 20, num_held_out: int = 64, seed: int = 0) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    train, held_out = split(largest, num_held_out, seed)
    write(directory / "train.jsonl", train)
    write(directory / "held_out.jsonl", held_out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/sums"), help="folder for train.jsonl and held_out.jsonl")
    parser.add_argument("--largest", type=int, default=20, help="largest operand")
    parser.add_argument("--held-out", type=int, default=64, help="problems kept for evaluation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.out, args.largest, args.held_out, args.seed)


if __name__ == "__main__":
    main()
