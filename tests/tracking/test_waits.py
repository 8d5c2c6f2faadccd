"""Who waits for whom, from what each process says of itself."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import psutil
import pytest

from miles.tracking import waits
from miles.tracking.waits import DRIVER, Beat, Call

NOW = 1000.0


def beat(name, waits_for=(), calls=(), notes=(), **fields):
    made = [Call(worker, method, NOW - age) for worker, method, age in waits_for]
    running = [Call(name, method, NOW - age) for method, age in calls]
    return Beat(name, time=fields.pop("time", NOW), waits=made, calls=running, notes=list(notes), **fields)


def told(*beats):
    return waits.chain({beat.name: beat for beat in beats}, NOW)


def test_the_chain_goes_to_the_one_that_waits_for_nobody():
    found = told(
        beat(DRIVER, [("executor", "get", 312)]),
        beat("executor", [("engine-0", "generate", 2), ("engine-1", "generate", 310), ("engine-1", "generate", 300)], [("get", 312)]),
        beat("engine-0", calls=[("generate", 2)]),
        beat("engine-1", calls=[("generate", 310), ("generate", 300)]),
    )
    assert found.sentence == "driver waits for executor (get, 312 s), which waits for engine-1 (generate, 310 s)"
    assert found.lines == [
        "driver waits 312 s for executor: get",
        "  executor waits 310 s (2 calls, the oldest) for engine-1: generate",
        "    engine-1: busy with generate for 310 s",
        "  executor waits 2 s for engine-0: generate",
        "    engine-0: busy with generate for 2 s",
    ]
    assert found.ends == ["engine-1", "engine-0"]


def test_what_is_no_worker_is_told_in_words():
    found = told(beat(DRIVER, [("executor", "get", 40)]), beat("executor", notes=["reward 'x' of 3 samples"]))
    assert found.sentence == "driver waits for executor (get, 40 s), which waits for reward 'x' of 3 samples"


def test_a_circle_is_called_one():
    found = told(beat("a", [("b", "f", 3)]), beat("b", [("a", "g", 3)]), beat(DRIVER, [("a", "run", 4)]))
    assert found.sentence.endswith("which waits for a (g, 3 s): a circle")
    assert len(found.lines) == 3


def test_a_worker_that_told_nothing_is_an_end_too():
    found = told(beat(DRIVER, [("actor-0", "train", 9)]))
    assert found.sentence == "driver waits for actor-0 (train, 9 s): nothing is known of it"
    assert found.ends == ["actor-0"]


def test_a_stopped_process_is_named_as_such():
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 20
        while psutil.Process(process.pid).status() != psutil.STATUS_STOPPED:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        silent = beat("engine-0", time=NOW - 60, pid=process.pid, calls=[("generate", 70)])
        found = told(beat(DRIVER, [("engine-0", "generate", 70)]), silent)
        assert f"no sign of life for 60 s: its process {process.pid} is stopped (SIGSTOP)" in found.sentence
    finally:
        process.kill()
        process.communicate()
    assert waits.process_state(silent, NOW).endswith(f"its process {process.pid} is gone")
    assert waits.process_state(beat("x", time=NOW - 60, host="elsewhere", pid=1), NOW) == "no sign of life for 60 s (pid 1 on elsewhere)"
    assert waits.process_state(beat("x"), NOW) == ""


def test_beats_outlive_their_processes_and_a_torn_one_is_left_out(tmp_path):
    said = beat("engine-0", [("executor", "x", 1)], [("generate", 2)], ["a thing"])
    waits.write(tmp_path, said)
    (tmp_path / f"engine-1{waits.ENDING}").write_text('{"name": "eng')
    assert waits.read(tmp_path) == {"engine-0": said}
    assert (said.host, said.pid) == (socket.gethostname(), os.getpid())


def test_at_the_end_of_a_run_what_was_before_it_counts(tmp_path):
    before = beat("executor", [("engine-0", "generate", 9)])
    waits.write(tmp_path, before)
    waits.keep(tmp_path)
    waits.write(tmp_path, beat("executor"))
    assert waits.read(tmp_path) == {"executor": before}


RANK = """worker {0}: train for 90.0 s

thread MainThread:
  File "x.py", line 1, in <module>
thread {0} compute:
  File "/a/miles/train/trainer.py", line 100, in train
    self.step()
  File "{1}", line 2800, in {2}
    work.wait()
"""


def test_the_rank_that_the_others_wait_for_in_a_collective():
    there, elsewhere = "/lib/torch/distributed/distributed_c10d.py", "/home/me/reward.py"
    stacks = {"actor-0": RANK.format("actor-0", there, "all_reduce"), "actor-1": RANK.format("actor-1", elsewhere, "slow")}
    assert waits.held_up_by(stacks) == "in a collective, waiting for the others: actor-0 in all_reduce; not in it: actor-1"
    assert waits.held_up_by({"actor-0": stacks["actor-0"]}) == ""


@pytest.mark.parametrize("answers", [True, False])
def test_stacks_are_asked_for_and_waited_for_within_a_limit(tmp_path, answers):
    waits.write(tmp_path, beat("engine-0"))

    def answer():
        while not (tmp_path / waits.ASKED).exists():
            time.sleep(0.01)
        waits.write(tmp_path, beat("engine-0", stacks="in decode", time=time.time() + 1))

    thread = threading.Thread(target=answer)
    if answers:
        thread.start()
    found = waits.ask_for_stacks(tmp_path, ["engine-0"], patience=20 if answers else 0.3)
    assert found == ({"engine-0": "in decode"} if answers else {})
    if answers:
        thread.join(20)
