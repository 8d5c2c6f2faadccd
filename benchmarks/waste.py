"""Waste: tokens that were generated and never trained, of all generated, in a fully asynchronous run.

    python benchmarks/waste.py --json waste.json

The engine counts its tokens, those of requests that were cut off too; the ledger says which groups were trained. Engine and trainer only
wait: once the trainer is several times slower than the engine, once faster, once as fast.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import null_run
from null_run import TOKENS, Pace
from report import machine, table, write

from miles.tracking import ledger

GROUPS, SIBLINGS = 8, 4
PACES = {"slow trainer": (0.02, 0.15), "as fast": (0.05, 0.05), "fast trainer": (0.1, 0.01)}
"""Seconds of one completion, and of one rollout's training."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollouts", type=int, default=30)
    parser.add_argument("--staleness", type=int, default=2, help="--max-weight-staleness")
    parser.add_argument("--json", help="also write the result to this file")
    options = parser.parse_args()
    rows: list[list[str]] = []
    result: dict[str, Any] = {"machine": machine("cpu"), "rollouts": options.rollouts, "staleness": options.staleness, "paces": {}}
    with tempfile.TemporaryDirectory() as folder:
        for name, (answer, train) in PACES.items():
            found = result["paces"][name] = measure(Path(folder), name.replace(" ", "-"), Pace(answer, train), options)
            rows.append([name, str(found["generated"]), str(found["trained"]), f"{found['waste']:.2%}"])
    print(table(["pace", "generated tokens", "trained", "waste"], rows))
    write(options.json, result)


def measure(folder: Path, name: str, pace: Pace, options: argparse.Namespace) -> dict[str, Any]:
    flags: dict[str, object] = {"--rollout-batch-size": GROUPS, "--n-samples-per-prompt": SIBLINGS, "--num-rollout": options.rollouts}
    flags |= {"--max-weight-staleness": options.staleness, "--engine-max-running": 4 * GROUPS * SIBLINGS}
    null_run.run(folder, name, pace, flags | {"--fully-async": True})
    groups = {line["group_index"] for line in ledger.read(folder / name / "ledger.jsonl") if line["event"] == "trained"}
    trained = len(groups) * SIBLINGS * TOKENS
    return {"generated": pace.generated, "trained": trained, "waste": 1 - trained / pace.generated}


if __name__ == "__main__":
    main()
