"""miles check-reward DATA --reward NAME: does the reward tell right from wrong on this data?"""

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

from miles.cli import data_command

if TYPE_CHECKING:
    from miles.config.run_config import RunConfig
    from miles.rewards.trial import TrialRow, Tried

SHOWN = 20
TOLD_EVERY = 5.0  # seconds


def main(argv: Sequence[str]) -> int:
    """0 when every gold answer gets everything and no wrong or empty one anything; 1 when not; 2 when it could not be tried."""
    parser = argparse.ArgumentParser(
        prog="miles check-reward", description="Score gold answers, wrong ones (another row's) and empty ones.", allow_abbrev=False
    )
    parser.add_argument("--rows", type=int, default=1000, help="try so many rows (1000)")
    parser.add_argument("--gold-key", help="field with a right response; default: made from the label, in the form that the reward wants")
    try:
        options, args = data_command.read(parser, argv)
        from miles.rewards.trial import try_reward

        rows = [row for name, path in options.paths.items() for row in islice(read(name, path, options.gold_key, args), options.rows)]
        tried = asyncio.run(try_reward(args, rows, progress()))
    except ValueError as error:
        print(f"miles check-reward: {error}", file=sys.stderr)
        return 2
    return show(tried, rows, args)


def progress() -> Callable[[int, int], None]:
    """Says on stderr how far it is, every few seconds."""
    last = time.monotonic()

    def told(done: int, of: int) -> None:
        nonlocal last
        if time.monotonic() - last > TOLD_EVERY:
            last = time.monotonic()
            print(f"{done} of {of} answers are scored", file=sys.stderr, flush=True)

    return told


def read(name: str, path: str, gold_key: str | None, args: "RunConfig") -> "Iterator[TrialRow]":
    """Raises ValueError with file and line."""
    from miles.data.dataset import read_row
    from miles.data.files import open_rows
    from miles.rewards.trial import TrialRow

    for found in open_rows(path):
        where = f"{path}:{found.origin.split()[-1]}"
        try:
            _, row = read_row(None, found.origin, found.value, args)
            gold = None if gold_key is None else found.value[gold_key]
        except KeyError:
            raise ValueError(f"{where}: no field {gold_key!r} (--gold-key)") from None
        except ValueError as error:
            if args.skip_bad_rows:
                print(f"{where}: left out: {error}", file=sys.stderr)
                continue
            raise ValueError(f"{where}: {error}") from None
        yield TrialRow(where, row.prompt, row.label, row.metadata, name, None if gold is None else str(gold))


def show(tried: "Sequence[Tried]", rows: "Sequence[TrialRow]", args: "RunConfig") -> int:
    from rich.console import Console
    from rich.table import Table

    from miles.rewards.trial import KINDS

    terminal = Console(soft_wrap=True)
    table = Table("answer", "tried", "full reward", "between", "none", "unscored", "failed", box=None, header_style="dim")
    for kind in KINDS:
        own = [each for each in tried if each.kind == kind]
        scored = [(each.reward, each.best) for each in own if each.reward is not None]
        full = sum(reward >= best - 1e-6 for reward, best in scored)
        nothing = sum(reward <= 1e-6 for reward, _ in scored)
        failed = sum(each.error is not None for each in own)
        numbers = (len(own), full, len(scored) - full - nothing, nothing, len(own) - len(scored) - failed, failed)
        table.add_row(kind, *map(str, numbers))
    by_set = "".join(f", {name}: {reward}" for name, reward in args.reward_by_set.items())
    print(f"{len(rows)} rows, reward {args.reward}{by_set}")
    terminal.print(table)
    problems = [each for each in tried if each.problem]
    for each in problems[:SHOWN]:
        shown = each.response if len(each.response) <= 80 else each.response[:77] + "..."
        label = "without a label" if each.row.label is None else f"for the label {str(each.row.label)[:80]!r}"
        print(f"{each.row.where}: the {each.kind} answer {shown!r} {label} {each.problem}")
    if len(problems) > SHOWN:
        print(f"... and {len(problems) - SHOWN} more")
    gold_tried = sum(each.kind == "gold" for each in tried)
    if rows and not any(each.kind == "wrong" for each in tried):
        print("no wrong answer was tried: no two rows have different labels")
    if without := len(rows) - gold_tried:
        print(f"{without} rows have no gold answer: no label that is one (--label-key), and no --gold-key")
    if not gold_tried:
        print("no gold answer was tried, so nothing is known of the reward")
        return 2
    print("the reward tells right from wrong" if not problems else f"{len(problems)} answers are scored WRONG")
    return 1 if problems else 0
