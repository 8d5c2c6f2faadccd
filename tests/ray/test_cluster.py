import os

import pytest

from miles.ray.cluster import Cluster


def test_far_more_workers_than_cpus_are_refused_before_anything_starts():
    with pytest.raises(ValueError, match=rf"ask for 1000 and this machine has {os.cpu_count()}.*--num-engines.*--cpus-per-engine"):
        Cluster(None, 1000.0)
