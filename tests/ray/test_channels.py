"""Ray's long reports of a death, in one sentence."""

import pytest
from ray.exceptions import OutOfMemoryError, RayError

from miles.ray.channels import _cause

LOW = "3 worker(s) were killed due to the node running low on memory. Memory on the node was 23.44GB used / 23.54GB limit\nmore"


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (OutOfMemoryError(LOW), "the host ran out of memory, and Ray ended it (23.44GB used / 23.54GB)"),
        (RayError("The actor died because of `ray.kill`"), "it was ended by the run"),
        (RayError("Worker unexpectedly exits with a connection error code 2. End of file."), "its process was killed or crashed"),
        (RayError("Something else."), "Something else."),
    ],
)
def test_a_cause_is_one_sentence(error, cause):
    assert cause in _cause(error)
    assert "\n" not in _cause(error)
