"""Writes train.jsonl and held_out.jsonl of any reasoning-gym task, drawn with a seed, with no question in both files.

Each prompt is plain text: one solved question of the task, then the question, so that a small model knows what an answer looks like.
The metadata are the task's own, which its scorer (reward `reasoning_gym`) needs.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import reasoning_gym

CHAIN_SUM = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""200 different questions: 64 held out, 135 to learn from, and the solved one."""


def entries(task: str, count: int, seed: int, options: dict[str, Any]) -> list[dict[str, Any]]:
    """`count` different questions of a task. Raises ValueError when the task does not have so many."""
    found: dict[str, dict[str, Any]] = {}
    for entry in reasoning_gym.create_dataset(task, size=20 * count, seed=seed, **options):
        found.setdefault(entry["question"], entry)
        if len(found) == count:
            return list(found.values())
    raise ValueError(f"{task} with these options has only {len(found)} different questions, {count} were asked for")


def row(entry: dict[str, Any], example: dict[str, Any]) -> str:
    prompt = f"{example['question']} {example['answer']}\n{entry['question']}"
    return json.dumps({"prompt": prompt, "label": entry["answer"], "metadata": entry["metadata"]}, default=str)


def make(
    directory: Path,
    task: str = "chain_sum",
    num_train: int = 135,
    num_held_out: int = 64,
    *,
    seed: int = 0,
    options: dict[str, Any] = CHAIN_SUM,
) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    example, *drawn = entries(task, 1 + num_held_out + num_train, seed, options)
    for name, part in (("held_out", drawn[:num_held_out]), ("train", drawn[num_held_out:])):
        (directory / f"{name}.jsonl").write_text("\n".join(row(entry, example) for entry in part) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--task", default="chain_sum", help="a task of reasoning-gym")
    parser.add_argument("--options", type=json.loads, help="the task's options as JSON, such as '{\"max_terms\": 4}'")
    parser.add_argument("--out", type=Path, help="folder for the two files; default: data/TASK")
    parser.add_argument("--train", type=int, help="questions to train on; default: 512, or the 135 that the recipe's own task has")
    parser.add_argument("--held-out", type=int, default=64, help="questions kept for evaluation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    options = args.options if args.options is not None else (CHAIN_SUM if args.task == "chain_sum" else {})
    train = args.train or (135 if options is CHAIN_SUM else 512)
    make(args.out or Path("data") / args.task, args.task, train, args.held_out, seed=args.seed, options=options)


if __name__ == "__main__":
    main()
