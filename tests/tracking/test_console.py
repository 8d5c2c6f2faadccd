"""What the terminal shows."""

import io

import pytest
from rich.console import Console as Terminal

from miles.tracking.console import Console
from miles.tracking.timeline import Timeline


def console(make, mode: str, terminal: Terminal | None = None, timeline: Timeline | None = None) -> Console:
    return Console(make(console=mode), timeline or Timeline(), terminal)


def feed(view: Console, rollouts: int) -> None:
    """Metrics as an asynchronous run logs them: the next rollout's before this one's training ends."""
    view.update({"eval/held_out/reward": 0.25}, 0, 0)
    view.update({"rollout/reward": 0.0, "rollout/response_length": 10.0}, 0)
    for rollout in range(rollouts):
        if rollout + 1 < rollouts:
            view.update({"rollout/reward": (rollout + 1) / 10, "rollout/response_length": 10.0}, rollout + 1)
        view.update({"train/loss": 1.0}, rollout)
        view.update({"perf/step_seconds": 2.0}, rollout)
        view.update({"eval/held_out/reward": 0.5, "eval/held_out/count": 4}, rollout, rollout + 1)


def test_plain_is_one_line_a_step(make, capsys):
    view = console(make, "plain")
    feed(view, 4)
    view.finish()
    view.finish()
    said = capsys.readouterr().err.splitlines()
    assert [line.split("  ")[0] for line in said] == ["rollout 0 (1/8)", "rollout 1 (2/8)", "rollout 2 (3/8)", "rollout 3 (4/8)", "end"]
    assert "reward 0.300" in said[3]
    assert "tok/s 320" in said[3]
    assert "eval/held_out/reward 0.500 (after rollout 2)" in said[3]
    assert "eval/held_out/reward 0.250 (before training)" in said[0]


def test_plain_without_perf_metrics_says_a_step_when_the_next_one_trains(make, capsys):
    view = console(make, "plain")
    for rollout in range(3):
        view.update({"rollout/reward": 1.0}, rollout)
        view.update({"train/loss": 1.0}, rollout)
    view.finish()
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_odd_values_do_not_disturb(make, capsys):
    view = console(make, "plain")
    view.update({"rollout/reward": None, "train/loss": "text", "perf/step_seconds": float("nan")}, 0)
    view.finish()
    assert "reward None  loss text" in capsys.readouterr().err


def test_quiet_says_nothing(make, capsys):
    view = console(make, "quiet")
    feed(view, 3)
    view.finish()
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("terminal", "mode"), [(True, "live"), (False, "plain")])
def test_auto_is_live_on_a_terminal_only(make, monkeypatch, terminal, mode):
    monkeypatch.delenv("CI", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    view = console(make, "auto", Terminal(file=io.StringIO(), force_terminal=terminal))
    assert view.mode == mode
    view.finish()


def test_the_live_view_shows_steps_evals_and_what_is_running(make):
    screen, line = io.StringIO(), Timeline()
    view = console(make, "live", Terminal(file=screen, force_terminal=True, width=120), line)
    feed(view, 3)
    with line.span("actor", "train", rollout_id=3):
        drawn = Terminal(file=io.StringIO(), width=120)
        drawn.print(view.view())
    text = drawn.file.getvalue()
    view.finish()
    assert "3/8 rollouts" in text
    assert "0.200" in text
    assert "held_out/reward 0.500 (after rollout 2)" in text
    assert "running  actor train" in text
    assert screen.getvalue()


def test_names_with_brackets_are_no_markup(make):
    view = Console(make(console="live", name="[red]x"), Timeline(), Terminal(file=io.StringIO(), force_terminal=True))
    view.update({"eval/[b]set[/b]/reward": 0.5}, 0)
    drawn = Terminal(file=io.StringIO(), width=120)
    drawn.print(view.view())
    view.finish()
    assert "[red]x" in drawn.file.getvalue()
    assert "[b]set[/b]/reward" in drawn.file.getvalue()
