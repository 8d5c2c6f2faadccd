"""What goes wrong ends the run: with the cause said last, a code that is not 0, and nothing left running."""

import os
import signal
import time

import pytest

import train_async
from miles.config.run_config import RunConfig

pytestmark = pytest.mark.filterwarnings("default")  # as users run it


@pytest.mark.slow
def test_a_reward_that_raises_ends_the_run_with_its_own_traceback(launch):
    run = launch("reward", "--reward", "tests.e2e.faulty.raises").end()
    assert run.code == 1
    assert "in raises" in run.err
    assert run.err.rstrip().splitlines()[-1].startswith("RuntimeError: the judge is out of its mind about")


def test_the_same_in_one_process(drive):
    with pytest.raises(RuntimeError, match="out of its mind"):
        drive("reward", "--reward", "tests.e2e.faulty.raises")


@pytest.mark.case("C51")
def test_a_reward_that_hangs_in_this_process_keeps_nobody(launch):
    flags = ("--in-process", "--reward-workers", 0, "--reward-timeout", 1)
    run = launch("hangs", "--reward", "tests.e2e.faulty.hangs", *flags).end(limit=120)
    assert run.code == 1
    assert "took longer than --reward-timeout 1 s" in run.err


def test_missing_parts_are_said_at_once(drive, tmp_path):
    (tmp_path / "empty.jsonl").write_text("")
    (tmp_path / "broken.jsonl").write_text('{"prompt": "1 + 1"}\n{"prompt": \n')
    for flags in (
        ("--hf-checkpoint", tmp_path / "nowhere"),
        ("--hf-checkpoint", "random:nonsense"),
        ("--prompt-data", tmp_path / "nowhere.jsonl"),
        ("--prompt-data", tmp_path / "empty.jsonl"),
        ("--prompt-data", tmp_path / "broken.jsonl"),
        ("--reward", "no_such_module.score"),
    ):
        with pytest.raises((ValueError, OSError, SystemExit)):
            drive("missing", *flags)


@pytest.mark.case("C83")
@pytest.mark.slow
def test_sigterm_saves_the_step_and_leaves_nothing(launch, tmp_path):
    """As `timeout`, service managers and batch systems send it: to the process, and to its whole group."""
    process = launch("term", "--num-rollout", 1000)
    process.wait_for(lambda run: run.trained(2))
    before = time.monotonic() - process.started
    process.process.send_signal(signal.SIGTERM)
    os.killpg(process.process.pid, signal.SIGTERM)
    run = process.end()
    assert run.seconds - before < 50, "it waited for processes that were gone"
    assert run.code == 128 + signal.SIGTERM
    assert "ended by SIGTERM; rollout" in run.err.splitlines()[-1]
    saved = sorted((run.folder / "checkpoints").glob("rollout_*/COMPLETE"))
    assert len(saved) == 1
    last = run.series("train/loss")[-1][0]
    assert saved[0].parent.name == f"rollout_{last:06d}"
    # And again at once, on the same machine, from where it stopped.
    resumed = launch("after", "--in-process", "--num-rollout", last + 2, "--load", run.folder / "checkpoints").end()
    assert resumed.code == 0, resumed.err
    assert [rollout for rollout, _ in resumed.series("train/loss")] == [last + 1]


@pytest.mark.slow
def test_ctrl_c_reaches_the_whole_terminal_and_ends_only_the_driver(launch):
    """A terminal sends SIGINT to every process of the group; the workers must leave the end to the driver."""
    process = launch("stop", "--num-rollout", 1000, "--no-save-on-signal")
    process.wait_for(lambda run: run.trained(1))
    os.killpg(process.process.pid, signal.SIGINT)
    run = process.end()
    assert run.code == 128 + signal.SIGINT
    assert run.err.splitlines()[-1] == "miles: ended by SIGINT"
    assert not list((run.folder / "checkpoints").glob("rollout_*"))


@pytest.mark.slow
def test_a_killed_trainer_ends_the_run_and_is_named(launch):
    process = launch("killed", "--num-rollout", 1000)
    process.wait_for(lambda run: run.trained(1))
    os.kill(process.worker("actor-0").pid, signal.SIGKILL)
    ended_by_the_death_of("actor-0", process.end())


@pytest.mark.slow
def test_one_lost_engine_of_two_is_done_without_and_the_last_one_ends_the_run(launch):
    process = launch("two", "--num-engines", 2, "--num-rollout", 1000)
    process.wait_for(lambda run: run.trained(1))
    os.kill(process.worker("engine-1").pid, signal.SIGKILL)
    process.wait_for(lambda run: "engine-1 is lost" in run.read(run.err))
    trained = (process.folder / "metrics.jsonl").read_text().count("train/loss")
    process.wait_for(lambda run: run.trained(trained + 4))
    os.kill(process.worker("engine-0").pid, signal.SIGKILL)
    run = process.end()
    ended_by_the_death_of("engine-0", run)
    rollouts = [rollout for rollout, _ in run.series("train/loss")]
    assert rollouts == list(range(len(rollouts)))


def ended_by_the_death_of(worker, run):
    assert run.code == 1
    assert f"worker {worker} died" in run.err
    assert f"logs/{worker}.log" in run.err


async def test_a_request_to_save_outlives_a_save_that_fails(tmp_path):
    class Part:
        fails = True

        async def save_model(self, rollout_id, force_sync):
            if self.fails:
                raise OSError("disk full")
            (tmp_path / "please").touch()  # another request comes meanwhile

        async def save(self, rollout_id):
            saved.append(rollout_id)

    saved, part = [], Part()
    args = RunConfig(save_trigger_sentinel=str(tmp_path / "please"), save_interval=None, num_rollout=9)
    (tmp_path / "please").touch()
    with pytest.raises(OSError, match="disk full"):
        await train_async.save_if_due(args, [part], part, 0, None)
    part.fails = False
    await train_async.save_if_due(args, [part], part, 1, None)
    assert saved == [1]
    assert [path.name for path in tmp_path.iterdir()] == ["please"], "the request that came during the save"
    (tmp_path / "please").unlink()
    await train_async.save_if_due(args, [part], part, 2, None)
    assert saved == [1]


def test_an_error_in_the_driver_leaves_the_process_clean(drive, monkeypatch):
    def broken(*args):
        raise ZeroDivisionError("in the driver itself")

    with monkeypatch.context() as patch:
        patch.setattr(train_async, "remove_rollout_data_refs", broken)
        with pytest.raises(ZeroDivisionError):
            drive("driver")
    assert len(drive("after", "--num-rollout", 1).series("train/loss")) == 1
