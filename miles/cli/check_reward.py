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
NAMED = 8  # rows
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
    print(f"{len(rows)} row{'' if len(rows) == 1 else 's'}, reward {args.reward}{by_set}")
    terminal.print(table)
    problems = [each for each in tried if each.problem]
    for each in problems[:SHOWN]:
        shown = each.response if len(each.response) <= 80 else each.response[:77] + "..."
        label = "without a label" if each.row.label is None else f"for the label {str(each.row.label)[:80]!r}"
        print(f"{each.row.where}: the {each.kind} answer {shown!r} {label} {each.problem}")
    if len(problems) > SHOWN:
        print(f"... and {len(problems) - SHOWN} more")
    print("".join(untested(tried, rows)), end="")
    print(verdict(tried, rows, len(problems)))
    return 2 if not any(each.kind == "gold" for each in tried) else 1 if problems else 0


def untested(tried: "Sequence[Tried]", rows: "Sequence[TrialRow]") -> list[str]:
    """What could not be tried, a line each."""
    lines = []
    if rows and not any(each.kind == "wrong" for each in tried):
        lines.append("no wrong answer was tried: " + ("there is one row" if len(rows) == 1 else "no two rows have different labels"))
    with_gold = {each.row.where for each in tried if each.kind == "gold"}
    if without := [row.where for row in rows if row.where not in with_gold]:
        named = ", ".join(without[:NAMED]) + (f" and {len(without) - NAMED} more" if len(without) > NAMED else "")
        have = "1 row has" if len(without) == 1 else f"{len(without)} rows have"
        lines.append(f"{have} no gold answer: no label that is one (--label-key), and no --gold-key: {named}")
    return [line + "\n" for line in lines]


def verdict(tried: "Sequence[Tried]", rows: "Sequence[TrialRow]", problems: int) -> str:
    """The last line: what is known of the reward now, and from how many answers."""
    if not any(each.kind == "gold" for each in tried):
        return "no gold answer was tried, so nothing is known of the reward"
    if problems:
        return f"{problems} of {len(tried)} answers {'is' if problems == 1 else 'are'} scored WRONG"
    scored = {kind: sum(each.kind == kind and each.reward is not None for each in tried) for kind in ("gold", "wrong", "empty")}
    counts = f"{scored['gold']} gold, {scored['wrong']} wrong and {scored['empty']} empty answers"
    if not scored["wrong"]:
        return f"all is well as far as it was tried ({counts}), but nothing is known of wrong answers"
    return f"the reward tells right from wrong on {scored['gold']} of {len(rows)} rows: {counts} were scored as they should be"
