"""C93: trackers get everything and can stop nothing. wandb, mlflow and trackio are stood in for by modules of their shape."""

import math
import sys
import threading
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from miles.config import metrics_file
from miles.tracking import history, sinks, tracking
from miles.tracking.sinks import Background

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")


class FakeWandb(ModuleType):
    def __init__(self, fail_at: str = "") -> None:
        super().__init__("wandb")
        self.fail_at, self.calls, self.logged, self.finished = fail_at, [], [], 0

    def init(self, **options):
        self._do("init")
        self.options = options
        return self

    def define_metric(self, name, step_metric=None):
        self._do("define_metric")

    def log(self, metrics):
        self._do("log")
        self.logged.append(metrics)

    def finish(self):
        self._do("finish")
        self.finished += 1

    def _do(self, what: str) -> None:
        self.calls.append(what)
        if what == self.fail_at:
            raise ConnectionError("the server is down")


class FakeMlflow(ModuleType):
    def __init__(self) -> None:
        super().__init__("mlflow")
        self.started, self.logged, self.params = [], [], {}

    def set_experiment(self, name): ...

    def start_run(self, run_id=None, run_name=None):
        self.started.append(run_id)
        return SimpleNamespace(info=SimpleNamespace(run_id=run_id or "abc"))

    def log_params(self, params):
        self.params = params

    def log_metrics(self, metrics, step):
        assert all(math.isfinite(value) for value in metrics.values())
        self.logged.append((step, metrics))

    def end_run(self): ...


class FakeTrackio(ModuleType):
    def __init__(self) -> None:
        super().__init__("trackio")
        self.logged = []

    def init(self, **options):
        self.options = options

    def log(self, metrics, step):
        self.logged.append((step, metrics))

    def finish(self): ...


@pytest.fixture
def install(monkeypatch):
    def put(module: ModuleType) -> ModuleType:
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return module

    return put


def play(args, rollouts=range(2)) -> None:
    tracking.init(args)
    for rollout in rollouts:
        tracking.log({"rollout/reward": rollout / 10, "odd": math.nan, "none": None}, rollout)
    tracking.finish()


def test_wandb_gets_metrics_with_their_axis_and_no_secret(make, install):
    wandb = install(FakeWandb())
    play(make(trackers=["wandb"], api_server_token="hush"))
    assert [line["step"] for line in wandb.logged] == [1, 2]
    assert wandb.logged[1]["rollout/reward"] == 0.1
    assert "none" not in wandb.logged[0]
    assert wandb.finished == 1
    assert "hush" not in str(wandb.options)


def test_mlflow_and_trackio_get_them_too(make, install):
    mlflow, trackio = install(FakeMlflow()), install(FakeTrackio())
    play(make(trackers=["mlflow", "trackio"]))
    assert [(step, line["rollout/reward"]) for step, line in mlflow.logged] == [(1, 0.0), (2, 0.1)]
    assert [(step, line["rollout/reward"]) for step, line in trackio.logged] == [(1, 0.0), (2, 0.1)]


@pytest.mark.case("C93")
@pytest.mark.parametrize("where", ["init", "define_metric", "log", "finish"])
def test_a_tracker_that_raises_is_switched_off_with_one_warning(make, install, caplog, where):
    install(FakeWandb(fail_at=where))
    args = make(trackers=["wandb"])
    play(args, range(5))
    warnings = [record for record in caplog.records if "tracker wandb is switched off" in record.message]
    assert len(warnings) == 1
    assert "the server is down" in warnings[0].message
    assert history.series(metrics_file.read(args.run_dir), "rollout/reward")[0] == [0, 1, 2, 3, 4]


@pytest.mark.case("C93")
def test_a_tracker_that_is_not_installed_says_how_to_get_it(make, caplog, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    play(make(trackers=["wandb"]))
    assert 'pip install "miles[wandb]"' in caplog.text


@pytest.mark.case("C93")
def test_a_tracker_that_hangs_blocks_neither_logging_nor_the_end(make, monkeypatch, caplog):
    monkeypatch.setattr(sinks, "FINISH_SECONDS", 0.05)
    monkeypatch.setattr(sinks, "QUEUE_LINES", 3)
    release = threading.Event()

    def hang(*_):
        release.wait(60)
        raise ConnectionError

    sink = Background("wandb", hang)
    for rollout in range(10):
        sink.log({"a": 1.0}, rollout, rollout)
    assert "3 lines behind" in caplog.text
    slow = Background("mlflow", hang)
    slow.finish()
    assert "did not finish within 0.05 s" in caplog.text
    release.set()


@pytest.mark.case("C93")
def test_a_resumed_run_is_the_same_run_at_the_tracker_and_does_not_fold_back(make, install, checkpoint):
    wandb, mlflow = install(FakeWandb()), install(FakeMlflow())
    args = make(trackers=["wandb", "mlflow"])
    play(args, range(4))
    first = wandb.options["id"]
    play(make(trackers=["wandb", "mlflow"], load=checkpoint(args, 1)), range(2, 6))
    assert wandb.options["id"] == first
    assert [line["rollout_id"] for line in wandb.logged] == [0, 1, 2, 3, 4, 5]
    assert mlflow.started == [None, "abc"]
    assert [step for step, _ in mlflow.logged] == [1, 2, 3, 4, 5, 6]


def test_another_run_of_that_name_is_another_run_at_the_tracker(make, install):
    wandb = install(FakeWandb())
    play(make(trackers=["wandb"]))
    first = wandb.options["id"]
    play(make(trackers=["wandb"]))
    assert wandb.options["id"] != first


def scalars(args, tag: str) -> list[tuple[int, float]]:
    events = EventAccumulator(str(Path(args.run_dir) / "tensorboard"))
    events.Reload()
    return [(event.step, round(event.value, 3)) for event in events.Scalars(tag)]


def test_tensorboard_reads_what_was_logged(make):
    args = make(trackers=["tensorboard"])
    play(args, range(3))
    assert scalars(args, "rollout/reward") == [(1, 0.0), (2, 0.1), (3, 0.2)]


@pytest.mark.case("C93")
def test_tensorboard_forgets_what_a_resumed_run_does_again(make, checkpoint):
    args = make(trackers=["tensorboard"])
    play(args, range(4))
    play(make(trackers=["tensorboard"], load=checkpoint(args, 1)), range(2, 5))
    assert scalars(args, "rollout/reward") == [(1, 0.0), (2, 0.1), (3, 0.2), (4, 0.3), (5, 0.4)]


def test_a_full_disk_costs_lines_and_not_the_run(caplog):
    sink = sinks.JsonLines(Path("/dev/full"))
    sink.log({"a": 1.0}, 3, 4)
    sink.log({"a": 1.0}, 4, 5)
    sink.finish()
    assert caplog.text.count("misses lines from rollout 3 on") == 1
