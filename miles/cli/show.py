"""miles show RUN: its steps and its last metrics."""

from collections.abc import Sequence

from miles.cli import runs
from miles.config import metrics_file
from miles.tracking import history


def main(argv: Sequence[str]) -> int:
    parser = runs.parser("show", "A run as a table.")
    parser.add_argument("--steps", type=int, default=20, help="show the last so many steps (20)")
    parser.add_argument("--metric", action="append", default=[], help="another column, a metric's name; may be given again")
    options = parser.parse_args(argv)

    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    lines = metrics_file.read(options.run)
    if not lines:
        print(f"{options.run}: no metrics yet")
        return 0
    rows = history.by_rollout(lines)
    columns = [name for name in history.USUAL if any(name in row for row in rows.values())] + options.metric
    columns += [name for name in history.names(lines) if name.startswith("eval/") and name.endswith("/reward")]
    terminal = Console()
    if not terminal.is_terminal:
        terminal.width = 200
    table = Table(
        "rollout",
        *(escape(name).replace("/", "/\n") for name in columns),
        box=None,
        header_style="dim",
        title=escape(str(options.run)),
        title_justify="left",
    )
    for rollout_id, row in list(rows.items())[-options.steps :]:
        table.add_row(str(rollout_id), *(_cell(row.get(name)) for name in columns))
    terminal.print(table)
    shown = {*columns, "rollout_id", "step", "time"}
    last = history.latest(lines)
    terminal.print("\n[dim]last value of the others[/]")
    rest = Table.grid(padding=(0, 2))
    for name in sorted(set(last) - shown):
        rest.add_row(escape(name), _cell(last[name]))
    terminal.print(rest)
    return 0


def _cell(value: object) -> str:
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) else str(value)
