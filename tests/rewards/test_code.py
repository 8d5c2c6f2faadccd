"""Programs that are right, wrong and hostile, run for real."""

import socket
import threading
import time
from pathlib import Path

import psutil
import pytest

from miles.config.reward import RewardSection
from miles.rewards import sandbox
from miles.rewards.code import Code, program_in, same_output
from miles.types import PromptGroup

ADD = "def add(a, b):\n    return a + b\n"
SUM = "print(sum(map(int, input().split())))"
FORK_BOMB = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"


@pytest.fixture(params=[True, False], ids=["namespaces", "python"])
def isolated(request, monkeypatch):
    """Both ways of keeping a program in; a machine without namespaces has only the second."""
    if request.param != sandbox.has_namespaces() or not request.param:
        monkeypatch.setattr(sandbox, "has_namespaces", lambda: False)
        monkeypatch.setattr(sandbox, "STARTING", 1.0)
        return False
    return True


def run(program, given="", seconds=2.0, memory_mb=400):
    return sandbox.run(program, given, seconds=seconds, memory_mb=memory_mb, clock=max(seconds, 2.0))


def left_over():
    """Living processes of any program. They are told to end before its result comes; how soon they are gone is the kernel's affair."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        living = [p.info for p in psutil.process_iter(["pid", "status", "cmdline"]) if p.info["status"] != psutil.STATUS_ZOMBIE]
        found = [info for info in living if any("miles-code-" in part for part in info["cmdline"] or [])]
        if not found:
            return []
        time.sleep(0.02)
    return found


def scored(answer, program, tests, **metadata):
    code = Code(RewardSection(code_timeout=5, reward_timeout=60))
    return code(answer(f"Here:\n```python\n{program}\n```\nDone.", None, metadata={"tests": tests, **metadata}))


@pytest.mark.parametrize(
    ("program", "tests", "passed"),
    [
        (SUM, [{"stdin": "1 2\n", "stdout": "3\n"}, {"stdin": "4 5", "stdout": "9  \n\n"}], 1.0),
        (SUM, [{"stdin": "1 2", "stdout": "3"}, {"stdin": "1 2", "stdout": "4"}], 0.5),
        (ADD, ["assert add(1, 2) == 3", {"function": "add", "args": ["a", "b"], "output": "ab"}], 1.0),
        (ADD, ["assert add(1, 2) == 4", "assert add(1, 2) == 3"], 0.5),
        (ADD, ["def check(f):\n    assert f(1, 1) == 2\ncheck(add)"], 1.0),
        (ADD + SUM, [{"stdin": "1 2", "stdout": "3"}], 1.0),
        ("def add(a, b) return", ["assert add(1, 2) == 3"], 0.0),
        (ADD + "import sys; sys.exit(0)", ["assert add(1, 2) == 3"], 0.0),
        (ADD + "import os; os._exit(0)", ["assert add(1, 2) == 3"], 0.0),
        ("print(input())\nraise SystemExit(1)", [{"stdin": "3", "stdout": "3"}], 0.0),
        ("def add(a, b):\n    raise SystemExit", ["assert add(1, 2) == 3"], 0.0),
    ],
)
def test_tests_of_every_form(answer, program, tests, passed):
    outcome = scored(answer, program, tests)
    assert (outcome["reward"], outcome["passed"]) == (float(passed == 1.0), passed)


def test_setup_comes_first_and_bad_tests_are_the_rows_fault(answer):
    assert scored(answer, "print(N)", [{"stdin": "", "stdout": "7"}], setup="N = 7")["reward"] == 1.0
    assert Code(RewardSection())(answer("x", None)) is None
    with pytest.raises(ValueError, match="a test is"):
        scored(answer, ADD, [{"input": "1", "output": "2"}])


def test_tests_as_json_text_are_the_same_tests(answer):
    assert scored(answer, ADD, '["assert add(1, 2) == 3", "assert add(1, 2) == 4"]')["passed"] == 0.5


@pytest.mark.parametrize(
    "tests",
    [
        "assert add(1, 2) == 3",
        {"stdin": "", "stdout": "3"},
        '{"stdin": "", "stdout": "3"}',
        '[{"stdin": "", "stdout": "3", "stdout": "4"}]',
        [{"stdin": ""}],
        [{"stdin": [1], "stdout": ""}],
        3,
    ],
)
def test_what_no_program_could_pass_is_never_a_0(answer, tests):
    with pytest.raises(ValueError, match=r"metadata tests is a list|a test with stdin has"):
        scored(answer, ADD, tests)


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("print(1)", "print(1)"),
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("```py\na\n```\n then ```\nb\n``` and ```bash\nls\n```", "b\n"),
        ("```cpp\nint x;\n```", "int x;\n"),
        ("<think>```python\na\n```</think>```python\nb\n```", "b\n"),
        ("```python\nnever closed", "never closed"),
        ("", ""),
    ],
)
def test_where_the_program_is(response, program):
    assert program_in(response) == program


@pytest.mark.parametrize(
    ("output", "same"), [("a\n b\n", True), ("a  \n b\n\n", True), ("a\nb", False), (" a\n b", False), ("a\n\n b", False), ("", False)]
)
def test_white_space_counts_where_it_shows(output, same):
    assert same_output(output, "a\n b") == same


def test_no_network(isolated):
    """A server that listens, so that a success would be seen."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        got = threading.Event()

        def listen():
            server.settimeout(10)
            try:
                server.accept()[0].close()
            except TimeoutError:
                return
            got.set()

        listener = threading.Thread(target=listen)
        listener.start()
        ran = run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=2)\nprint('connected')")
        assert (ran.fault, ran.output) == ("exit code 1", "")
        assert "PermissionError: socket." in ran.errors or "Network is unreachable" in ran.errors or "Connection refused" in ran.errors
        assert not got.is_set()
        socket.create_connection(("127.0.0.1", port)).close()
        listener.join()
        assert got.is_set()


def test_no_traces_outside_of_its_folder(isolated, tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("safe")
    for attempt in [
        f"open({str(victim)!r}, 'w')",
        f"import os; os.remove({str(victim)!r})",
        f"import shutil; shutil.rmtree({str(tmp_path)!r})",
    ]:
        assert run(attempt).fault == "exit code 1"
    assert victim.read_text() == "safe"
    ran = run("open('own', 'w').write('x'); print(open('own').read()); import os; print(os.getcwd())")
    assert ran.output.startswith("x\n")
    assert not Path(ran.output.split()[1]).exists()


@pytest.mark.parametrize(
    ("program", "fault"),
    [
        ("while True: pass", "time"),
        ("import time; time.sleep(3600)", "time"),
        (FORK_BOMB, "processes"),
        ("x = bytearray(4 << 30)", "memory"),
        ("x = []\nwhile True: x.append('a' * 1000000)", "memory"),
        ("while True: print('x' * 100000)", "exit code 1"),
        ("import sys; sys.exit(3)", "exit code 3"),
        ("import os; os.abort()", "signal 6"),
    ],
)
def test_what_is_ended_and_why(isolated, program, fault):
    if program == FORK_BOMB and not isolated:
        fault = "time"  # Python refuses every fork, and the program never gives up
    ran = run(program, seconds=1.0 if fault == "time" else 30.0)
    assert ran.fault == fault
    assert ran.isolated == isolated
    assert not left_over()


def test_the_kernel_counts_processes_of_root_too(isolated):
    """Or a bomb would be faster than whoever looks at it."""
    ran = run("import os, time\nfor made in range(200):\n    if os.fork() == 0:\n        time.sleep(60)")
    assert ("BlockingIOError" if isolated else "os.fork is not allowed here") in ran.errors
    assert not left_over()


def test_children_do_not_outlive_the_program(isolated):
    run("import os, time\nif os.fork() == 0:\n    time.sleep(3600)\nprint('parent')")
    assert not left_over()


async def test_each_attack_costs_only_its_own_sample(scorer, answer):
    attacks = [
        "import socket; socket.create_connection(('1.1.1.1', 80), 1)",
        FORK_BOMB,
        "while True: pass",
        "x = bytearray(8 << 30)",
        "import os; os.kill(1, 9); os.kill(os.getppid(), 9)",
    ]
    programs = [SUM, *(f"{attack}\nprint(7)" for attack in attacks), SUM]
    tests = [{"stdin": "1 2", "stdout": "3"}]
    samples = [answer(f"```python\n{program}\n```", None, metadata={"tests": tests}) for program in programs]
    each = scorer("code", code_timeout=2, reward_workers=2, reward_timeout=60)
    await each.score_group(PromptGroup(1, 0, 0, samples))
    assert [sample.reward for sample in samples] == [1.0, *[0.0] * len(attacks), 1.0]
    assert each.num_failed == 0


def test_a_program_with_many_slow_tests_gets_its_zero_before_the_scorer_gives_up(answer):
    code = Code(RewardSection(code_timeout=1, reward_timeout=2))
    sample = answer("while True: pass", None, metadata={"tests": [{"stdin": "", "stdout": ""}] * 50})
    assert code(sample)["reward"] == 0.0
