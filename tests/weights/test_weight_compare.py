"""Two tables of checksums."""

import subprocess
import sys

from miles.weights.compare import compare_checksums


def test_what_differs_is_missing_or_extra() -> None:
    sent = {"a": "1", "b": "2", "c": "3", "d": "4"}
    found = compare_checksums(sent, {"z": "9", "d": "4", "b": "0", "a": "7"})
    assert (found.differing, found.missing, found.extra, found.equal) == (("a", "b"), ("c",), ("z",), False)
    assert str(found) == "2 differ: a, b; 1 are missing: c; 1 were never sent: z"


def test_equal_tables() -> None:
    found = compare_checksums({"a": "1", "b": "2"}, {"b": "2", "a": "1"})
    assert found.equal
    assert str(found) == "all tensors are equal"
    assert compare_checksums({}, {}).equal


def test_long_lists_are_shortened() -> None:
    found = compare_checksums({f"w{i}": "0" for i in range(30)}, {})
    assert str(found) == "30 are missing: w0, w1, w2, w3, w4, w5, w6, w7, and 22 more"


def test_it_needs_no_torch() -> None:
    code = "import sys, miles.weights.compare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
