"""miles ledger RUN: do the books balance?"""

import json
from collections.abc import Sequence

from miles.cli import runs
from miles.tracking import ledger


def main(argv: Sequence[str]) -> int:
    """0 when they balance, 1 when they do not."""
    parser = runs.parser(
        "ledger",
        "What became of every prompt group of a run: taken = trained + filtered + dropped + returned + abandoned + those still open.",
    )
    parser.add_argument("--group", type=int, help="the history of one group, as JSON lines")
    options = parser.parse_args(argv)
    path = options.run / "ledger.jsonl"
    lines = list(ledger.read(path))
    if options.group is not None:
        told = [line for line in lines if line["group_index"] == options.group]
        if not told:
            last = max((line["group_index"] for line in lines), default=-1)
            parser.error(f"--group {options.group}: the ledger has no such group; the last one is {last}")
        print("\n".join(map(json.dumps, told)))
        return 0
    books = ledger.balance(lines)
    books.faults += [f"line {number} is damaged" for number in ledger.damaged(path)]
    print(f"{'taken':<12}{books.taken:>8}")
    for event in ledger.ENDS:
        print(f"{event:<12}{books.ended[event]:>8}")
        for reason, count in sorted(books.reasons.items()):
            if reason.startswith(event + ": "):
                print(f"{'':<12}{count:>8}  {reason.split(': ', 1)[1]}")
    for stage in ledger.STAGES.values():
        groups = sorted(group for group, where in books.stage.items() if where == stage)
        print(f"{stage:<12}{len(groups):>8}" + (f"  groups {_some(groups)}" if groups else ""))
    if books.retried:
        print(f"({books.retried} attempts failed and were made again)")
    for fault in books.faults:
        print(f"WRONG: {fault}")
    print("the books balance" if books.holds else "the books do NOT balance")
    return 0 if books.holds else 1


def _some(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers[:10])) + (", ..." if len(numbers) > 10 else "")
