"""Progress on the terminal: a live view, or one plain line a step."""

import os
import sys
import time
from typing import Any

from rich.console import Console as Terminal
from rich.console import Group
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from miles.config.run_config import RunConfig
from miles.tracking.clock import now
from miles.tracking.timeline import Timeline

COLUMNS = (
    ("reward", "rollout/reward", "{:.3f}"),
    ("length", "rollout/response_length", "{:.1f}"),
    ("lag", "train/weight_lag_max", "{:.0f}"),
    ("loss", "train/loss", "{:+.4f}"),
    ("grad", "train/grad_norm", "{:.3g}"),
    ("s/step", "perf/step_seconds", "{:.2f}"),
    ("tok/s", "perf/tokens_per_second", "{:.0f}"),
    ("overlap", "perf/overlap_efficiency", "{:.2f}"),
)
ROWS = 12


class Console:
    """Collects a rollout's metrics as they come and shows them once its step is over."""

    def __init__(self, args: RunConfig, timeline: Timeline, terminal: Terminal | None = None) -> None:
        self.args = args
        self.timeline = timeline
        self.terminal = terminal or Terminal(stderr=True)
        self.open: dict[int, dict[str, Any]] = {}
        self.done: list[tuple[int, dict[str, Any]]] = []
        self.evals: dict[str, tuple[str, float]] = {}
        self.unsaid: list[str] = []
        self.bound = ""  # what bounds the run, in a sentence
        self.started = time.monotonic()
        mode = args.console
        if mode == "auto":
            dumb = os.environ.get("TERM") == "dumb" or "CI" in os.environ
            mode = "live" if self.terminal.is_terminal and not dumb else "plain"
        self.mode = mode
        self.live = None
        if mode == "live":
            self.live = Live(get_renderable=self.view, console=self.terminal, refresh_per_second=4, transient=False)
            self.live.start()

    def update(self, metrics: dict[str, Any], rollout_id: int, step: int | None = None) -> None:
        """Take in metrics of a rollout. Its step is over with its perf metrics, at the latest when a later rollout has trained.

        Rollouts are called by their ids, which count from 0, here as in files; `step` 0 is an evaluation before any training.
        """
        if self.mode == "quiet":
            return
        for name, value in metrics.items():
            if name.startswith("eval/") and isinstance(value, int | float):
                when = "before training" if step == 0 else f"after rollout {rollout_id}"
                self.evals[name.removeprefix("eval/")] = (when, value)
                if name.endswith(("/reward", "/loss")):
                    self.unsaid.append(f"{name} {value:.3f} ({when})")
        rest = {name: value for name, value in metrics.items() if not name.startswith("eval/")}
        if rest:
            self.open.setdefault(rollout_id, {}).update(rest)
        if any(name.startswith("perf/step") for name in rest):
            self._over(rollout_id)
        if any(name.startswith("train/") for name in rest):
            for earlier in sorted(open_id for open_id in self.open if open_id < rollout_id):
                self._over(earlier)

    def finish(self) -> None:
        """Show what is still open, and give the terminal back. Idempotent."""
        for rollout_id in sorted(self.open):
            self._over(rollout_id)
        if self.live is not None:
            self.live.stop()
            self.live = None
        elif self.mode == "plain" and self.unsaid:
            self._say("end", {})
        if self.bound and self.mode != "quiet":
            print(self.bound, file=sys.stderr, flush=True)
            self.bound = ""

    def _over(self, rollout_id: int) -> None:
        metrics = self.open.pop(rollout_id)
        if self.done and self.done[-1][0] == rollout_id:  # late metrics of a step that was shown already
            self.done[-1][1].update(metrics)
            return
        if "perf/tokens_per_second" not in metrics and metrics.get("perf/step_seconds") and "rollout/response_length" in metrics:
            tokens = metrics["rollout/response_length"] * self.args.samples_per_rollout
            metrics["perf/tokens_per_second"] = tokens / metrics["perf/step_seconds"]
        self.done = [*self.done[1 - ROWS :], (rollout_id, metrics)]
        if self.mode == "plain":
            of = "" if self.args.num_rollout is None else f" ({rollout_id + 1}/{self.args.num_rollout})"
            self._say(f"rollout {rollout_id}{of}", metrics)

    def _say(self, head: str, metrics: dict[str, Any]) -> None:
        parts = [f"{title} {_show(form, metrics[name])}" for title, name, form in COLUMNS if name in metrics]
        print("  ".join([head, *parts, *self.unsaid]), file=sys.stderr, flush=True)
        self.unsaid = []

    def view(self) -> Group:
        """The live view: a bar, the last steps, the last evaluations, and what the run waits for."""
        done = self.done[-1][0] + 1 if self.done else 0
        total = self.args.num_rollout
        minutes, seconds = divmod(int(time.monotonic() - self.started), 60)
        head = Table.grid(padding=(0, 1))
        count = f"{done}/{total}" if total else f"{done}"
        head.add_row(
            f"[bold]{escape(self.args.name)}[/]", f"{count} rollouts", ProgressBar(total or None, done, width=40), f"{minutes}:{seconds:02}"
        )
        steps = Table(box=None, padding=(0, 1), header_style="dim")
        steps.add_column("rollout", justify="right")
        for title, _, _ in COLUMNS:
            steps.add_column(title, justify="right")
        for rollout_id, metrics in self.done[-ROWS:]:
            cells = [_show(form, metrics[name]) if name in metrics else "" for _, name, form in COLUMNS]
            steps.add_row(str(rollout_id), *cells)
        moment = now()
        waits = [f"{escape(span.worker)} {escape(span.name)} {moment - span.start:.1f} s" for span in self.timeline.running()]
        evals = [
            f"{escape(name)} [green]{value:.3f}[/] [dim]({when})[/]"
            for name, (when, value) in self.evals.items()
            if "/reward" in name or "pass@" in name
        ]
        parts: list[Any] = [head]
        if self.done:
            parts.append(steps)
        if evals:
            parts.append(Text.from_markup("eval     " + "   ".join(evals)))
        if self.bound:
            parts.append(Text.assemble(("speed    ", ""), self.bound, overflow="ellipsis"))
        parts.append(Text.from_markup(f"[dim]running[/]  {', '.join(waits) or 'nothing'}", overflow="ellipsis"))
        return Group(*parts)


def _show(form: str, value: Any) -> str:
    return form.format(value) if isinstance(value, int | float) else str(value)
