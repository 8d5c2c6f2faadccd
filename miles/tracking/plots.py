"""A picture of a run: reward, held-out accuracy, lag, and who did what when."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from miles.config import metrics_file
from miles.tracking import history, trace_file

INK, FAINT, GRID = "#22272e", "#8b949e", "#e4e7eb"
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#3567b7", "#dd8a26", "#3a9c6b", "#c44f52", "#8064a2", "#7fb2dd"
ACTIVITY = {"generate": BLUE, "train": ORANGE, "publish": RED, "eval": GREEN, "save": PURPLE, "score": SKY, "load weights": RED}
SHOWN_STEPS = 6


def plot_run(folder: str | Path, out: str | Path | None = None) -> Path:
    """Draw a run folder's picture.

    Args:
        folder: the run.
        out: the file; its ending gives the format. Default: plot.png in the run folder.

    Raises:
        ValueError: the run has no metrics yet.
    """
    folder = Path(folder)
    lines = metrics_file.read(folder)
    if not lines:
        raise ValueError(f"{folder} has no metrics yet")
    figure = Figure(figsize=(11, 7.2), dpi=130, layout="constrained", facecolor="white")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["reward", "eval", "lag"], ["time", "time", "time"]], height_ratios=[1.25, 1])
    draw_reward(panels["reward"], lines)
    draw_evals(panels["eval"], lines)
    draw_lag(panels["lag"], lines)
    draw_timeline(panels["time"], trace_file.read(folder / "timeline.json"))
    figure.suptitle(_title(folder.name, lines), x=0.012, ha="left", fontsize=13, color=INK)
    out = folder / "plot.png" if out is None else Path(out)
    figure.savefig(out)
    return out


def _title(name: str, lines: list[dict[str, Any]]) -> str:
    rollouts = len({line["rollout_id"] for line in lines})
    seconds = max(line["time"] for line in lines) - min(line["time"] for line in lines)
    clock = f"{seconds / 60:.1f} min" if seconds >= 90 else f"{seconds:.0f} s"
    return f"{name}:  {rollouts} rollout{'s' * (rollouts != 1)}, {clock}"


def _frame(axes: Axes, title: str, xlabel: str = "rollout") -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK, pad=8)
    axes.set_xlabel(xlabel, fontsize=9, color=FAINT)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)
    axes.tick_params(colors=FAINT, labelsize=9, length=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))


def _nothing(axes: Axes, what: str) -> None:
    axes.text(0.5, 0.5, what, transform=axes.transAxes, ha="center", va="center", color=FAINT, fontsize=9)
    axes.set_yticks([])


def _limits(axes: Axes, x: Sequence[float], y: Sequence[float]) -> None:
    """Scores between 0 and 1 are shown on that whole scale, so that a small rise does not look like a large one."""
    axes.margins(x=0.08, y=0.16)
    if y and min(y) >= 0 and max(y) <= 1:
        axes.set_ylim(0, 1.08)
    if len(set(x)) == 1:
        axes.set_xlim(x[0] - 1, x[0] + 1)


def smooth(values: Sequence[float], weight: float = 0.7) -> list[float]:
    """Exponential moving average, corrected for its start."""
    smoothed, level, mass = [], 0.0, 0.0
    for value in values:
        level = weight * level + (1 - weight) * value
        mass = weight * mass + (1 - weight)
        smoothed.append(level / mass)
    return smoothed


def draw_reward(axes: Axes, lines: list[dict[str, Any]]) -> None:
    """Each rollout's mean reward as a dot, and their moving average."""
    _frame(axes, "Reward in training")
    x, y = history.series(lines, "rollout/reward")
    if not x:
        _nothing(axes, "no reward was logged")
        return
    axes.plot(x, y, "o", color=BLUE, alpha=0.35, markersize=4.5, markeredgewidth=0, label="mean of a rollout")
    axes.plot(x, smooth(y), color=BLUE, linewidth=2, label="moving average")
    _limits(axes, x, y)
    axes.legend(frameon=False, fontsize=8, labelcolor=FAINT, loc="best")


def draw_evals(axes: Axes, lines: list[dict[str, Any]]) -> None:
    """The score of every evaluation set, at the rollout whose weights it measured."""
    _frame(axes, "Held-out score")
    sets = [name for name in history.names(lines) if name.startswith("eval/") and name.endswith("/reward")]
    if not sets:
        _nothing(axes, "no evaluation was logged")
        return
    for name, color in zip(sets, (GREEN, PURPLE, ORANGE, RED, SKY) * len(sets), strict=False):
        x, y = history.series(lines, name, "step")
        axes.plot(
            x, y, "o-", color=color, linewidth=2, markersize=5, markeredgecolor="white", label=name.split("/", 1)[1].removesuffix("/reward")
        )
        below = len(y) > 1 and y[1] >= y[0]
        for at, offset, side in ((0, (9, -11) if below else (0, 8), "left"), (len(x) - 1, (0, 8), "center"))[: len(x)]:
            axes.annotate(f"{y[at]:.2f}", (x[at], y[at]), offset, textcoords="offset points", ha=side, fontsize=9, color=color)
    axes.set_xlabel("optimizer step", fontsize=9, color=FAINT)
    everywhere = [history.series(lines, name, "step") for name in sets]
    _limits(axes, [at for x, _ in everywhere for at in x], [value for _, y in everywhere for value in y])
    axes.legend(frameon=False, fontsize=8, labelcolor=FAINT, loc="best")


def draw_lag(axes: Axes, lines: list[dict[str, Any]]) -> None:
    """How far behind the trainer's weights the samples' weights were when they were trained."""
    _frame(axes, "Lag of the samples, in weight versions")
    x, worst = history.series(lines, "train/weight_lag_max")
    if not x:
        _nothing(axes, "no lag was logged")
        return
    axes.step(x, worst, where="mid", color=RED, linewidth=1.6, label="oldest token")
    mean_x, mean = history.series(lines, "train/weight_lag")
    if mean_x:
        axes.fill_between(mean_x, mean, step="mid", color=ORANGE, alpha=0.3, linewidth=0, label="mean")
    axes.set_ylim(0, max([*worst, 1]) * 1.25)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True, nbins=5))
    axes.legend(frameon=False, fontsize=8, labelcolor=FAINT, loc="best")


def draw_timeline(axes: Axes, events: list[dict[str, Any]]) -> None:
    """A few steps from the middle of the run: one row per worker, one bar per span."""
    _frame(axes, "Who did what when", "seconds")
    axes.grid(visible=False, axis="y")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=12))
    rows = {event["tid"]: event["args"]["name"] for event in events if event.get("ph") == "M"}
    spans = [event for event in events if event.get("ph") == "X" and event["tid"] in rows]
    if not spans:
        _nothing(axes, "no timeline was written")
        return
    start, end, said = window(spans)
    axes.set_title(f"Who did what when, {said}", loc="left", fontsize=11, color=INK, pad=8)
    seen = [worker for worker in rows if any(span["tid"] == worker and _inside(span, start, end) for span in spans)]
    for span in spans:
        if span["tid"] in seen and _inside(span, start, end):
            left, right = max(span["ts"], start), min(span["ts"] + span["dur"], end)
            color = ACTIVITY.get(span["name"], FAINT)
            row = seen.index(span["tid"])
            axes.barh(row, (right - left) / 1e6, left=(left - start) / 1e6, height=0.62, color=color, edgecolor="white", linewidth=0.8)
            number = span["args"].get("rollout_id")
            if number is not None and right - left > (end - start) * 0.025:
                axes.text(((left + right) / 2 - start) / 1e6, row, str(number), ha="center", va="center", color="white", fontsize=8)
    axes.set_yticks(range(len(seen)), [rows[worker] for worker in seen], color=INK)
    axes.set_ylim(len(seen) - 0.4, -0.6)
    axes.set_xlim(0, (end - start) / 1e6)
    names = [name for name in ACTIVITY if any(span["name"] == name and _inside(span, start, end) for span in spans)]
    handles = [Patch(color=ACTIVITY[name], label=name) for name in names]
    axes.legend(handles=handles, frameon=False, fontsize=8, labelcolor=FAINT, ncols=len(handles), loc="lower right", bbox_to_anchor=(1, 1))


def window(spans: list[dict[str, Any]]) -> tuple[float, float, str]:
    """From when to when (microseconds) the timeline is drawn, and how to say it: up to SHOWN_STEPS steps around the middle."""
    trained = sorted({span["args"]["rollout_id"] for span in spans if span["name"] == "train" and "rollout_id" in span["args"]})
    if len(trained) <= SHOWN_STEPS:
        return min(span["ts"] for span in spans), max(span["ts"] + span["dur"] for span in spans), "the whole run"
    first = (len(trained) - SHOWN_STEPS) // 2
    chosen = trained[first : first + SHOWN_STEPS]
    inside = [span for span in spans if span["name"] in ("train", "publish") and span["args"].get("rollout_id") in chosen]
    told = f"rollouts {chosen[0]} to {chosen[-1]}"
    return min(span["ts"] for span in inside), max(span["ts"] + span["dur"] for span in inside), told


def _inside(span: dict[str, Any], start: float, end: float) -> bool:
    return bool(span["ts"] < end and span["ts"] + span["dur"] > start)
