"""code: the program in the response passes its row's tests, each run in a sandbox."""

from __future__ import annotations

import re
import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

from miles.config.reward import RewardSection
from miles.data.tokenizer import read_json
from miles.rewards.sandbox import CLOCK_FACTOR, Ran, has_namespaces, run
from miles.types import Sample

FENCED = re.compile(r"```[ \t]*(\w*)[^\n]*\n(.*?)(?:```|\Z)", re.DOTALL)
SHARE_OF_LIMIT = 0.7
"""Of reward_timeout: tests that do not fit into it count as failed, so that the answer gets its 0 before the scorer gives up."""


class Code:
    """1.0 when every test passes, else 0.0; details: `passed`, the share of tests, and `isolated`, whether the kernel shuts it in.

    The tests are the list "tests" of the row's metadata, in any mixture:

    - {"stdin": "1 2\\n", "stdout": "3\\n"}: the program is run with that input; white space at line ends and at the end is nothing.
    - {"function": "add", "args": [1, 2], "output": 3}: called in the program's process, compared with ==.
    - "assert add(1, 2) == 3": any statements, run behind the program; an exception is a failure.

    Metadata "setup", if there, is put before the program. None for a row without tests.
    """

    def __init__(self, args: RewardSection):
        self._seconds = args.code_timeout
        self._memory = args.code_memory_mb
        self._all = args.reward_timeout * SHARE_OF_LIMIT
        has_namespaces()  # tried, and told, before the first answer

    def __call__(self, sample: Sample) -> dict[str, float] | None:
        tests = tests_of(sample.metadata)
        if not tests:
            return None
        end = time.monotonic() + self._all
        program = program_in(sample.response)
        with_input = [test for test in tests if isinstance(test, dict) and "stdin" in test]
        behind = [statements(test) for test in tests if not (isinstance(test, dict) and "stdin" in test)]
        if not program.strip():
            return {"reward": 0.0, "passed": 0.0}
        program = f"{sample.metadata.get('setup') or ''}\n{program}\n"
        passed, isolated = self._behind(program, behind, end), has_namespaces()
        for test in with_input:
            ran = self._run(program, test["stdin"], end)
            passed += ran is not None and not ran.fault and same_output(ran.output, test["stdout"])
        return {"reward": float(passed == len(tests)), "passed": passed / len(tests), "isolated": float(isolated)}

    def _behind(self, program: str, tests: list[str], end: float) -> int:
        """How many of the statements pass, all in one run. A mark that the program cannot guess says so of each."""
        if not tests:
            return 0
        mark = secrets.token_hex(16)
        ran = self._run(program + HARNESS.format(tests=tests, mark=mark), "", end)
        return 0 if ran is None else sum(f"{mark} {place}" in ran.output for place in range(len(tests)))

    def _run(self, program: str, given: str, end: float) -> Ran | None:
        left = end - time.monotonic()
        if left <= 0:
            return None
        return run(program, given, seconds=self._seconds, memory_mb=self._memory, clock=min(CLOCK_FACTOR * self._seconds, left))


HARNESS = """
def _run_the_tests(place_and_test, mark, names, say):
    for place, test in place_and_test:
        try:
            exec(compile(test, f"test {{place}}", "exec"), dict(names))
        except BaseException as error:
            import sys
            print(f"test {{place}}: {{type(error).__name__}}: {{error}}", file=sys.stderr)
        else:
            say(f"\\n{{mark}} {{place}}\\n")


import sys as _sys
_run_the_tests(list(enumerate({tests!r})), {mark!r}, globals(), lambda text: (_sys.__stdout__.write(text), _sys.__stdout__.flush()))
"""


def program_in(response: str) -> str:
    """The last fenced block that is Python or unnamed, else the last of any, else the whole response; thoughts left out."""
    text = response.rpartition("</think>")[2]
    blocks = FENCED.findall(text)
    python = [body for language, body in blocks if language.lower() in ("", "python", "py", "python3")]
    found = python or [body for _, body in blocks]
    return str(found[-1]) if found else text


def tests_of(metadata: Mapping[str, Any]) -> Sequence[Any]:
    """A row's tests, which may be JSON text. Raises ValueError for anything that is not a list of tests: no program could pass it."""
    tests = metadata.get("tests")
    if isinstance(tests, str) and tests:
        try:
            tests = read_json(tests)
        except ValueError as error:
            raise ValueError(f"metadata tests is a list, or that list as JSON text, not {tests[:200]!r} ({error})") from None
    if tests is not None and not isinstance(tests, (list, tuple)):
        raise ValueError(f"metadata tests is a list of tests, not {str(tests)[:200]}")
    for test in tests or ():
        if isinstance(test, dict) and "stdin" in test and not (isinstance(test["stdin"], str) and isinstance(test.get("stdout"), str)):
            raise ValueError(f"a test with stdin has the texts stdin and stdout, not {str(test)[:200]}")
    return tests or ()


def statements(test: Any) -> str:
    """A test that is run behind the program, as statements. Raises ValueError for what is no test: the row is at fault."""
    if isinstance(test, str):
        return test
    if isinstance(test, dict) and {"function", "args", "output"} <= test.keys():
        return f"assert {test['function']}(*{test['args']!r}) == {test['output']!r}"
    raise ValueError(f"a test is {{stdin, stdout}}, {{function, args, output}} or statements, not {str(test)[:200]}")


def same_output(output: str, wanted: str) -> bool:
    return [line.rstrip() for line in output.rstrip().split("\n")] == [line.rstrip() for line in wanted.rstrip().split("\n")]
