"""Writes conversations about sums, drawn with a seed: train.jsonl to imitate, held_out.jsonl (other sums) to test with."""

import argparse
import json
import random
from pathlib import Path


def conversation(a: int, b: int) -> str:
    question = {"role": "user", "content": f"What is {a} + {b}? Answer with only the number."}
    return json.dumps({"messages": [question, {"role": "assistant", "content": str(a + b)}]})


def make(directory: Path, largest: int = 50, num_train: int = 512, num_held_out: int = 64, seed: int = 0) -> None:
    pairs = [(a, b) for a in range(1, largest + 1) for b in range(a, largest + 1)]
    if num_train + num_held_out > len(pairs):
        raise ValueError(f"only {len(pairs)} different pairs up to {largest}, {num_train + num_held_out} were asked for")
    random.Random(seed).shuffle(pairs)
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("held_out", pairs[:num_held_out]), ("train", pairs[num_held_out : num_held_out + num_train])):
        (directory / f"{name}.jsonl").write_text("\n".join(conversation(a, b) for a, b in part) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("data/sft-sums"), help="folder for train.jsonl and held_out.jsonl")
    parser.add_argument("--largest", type=int, default=50, help="largest operand")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    make(args.out, largest=args.largest, seed=args.seed)


if __name__ == "__main__":
    main()
