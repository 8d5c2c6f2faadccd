"""One seed, one result: twice in one process, and with every worker in a process of its own."""

import pytest

pytestmark = pytest.mark.filterwarnings("default")  # as users run it


@pytest.mark.slow
def test_the_same_run_twice_and_with_processes_gives_the_same_values(drive, launch):
    flags = ("--num-rollout", 3, "--eval-interval", 2)
    once, again = drive("once", *flags), drive("again", *flags)
    assert once.values() == again.values()
    apart = launch("apart", *flags).end()
    assert apart.code == 0, apart.err
    assert apart.values() == once.values()


def test_another_seed_gives_other_values(drive):
    one, two = drive("one", "--num-rollout", 1), drive("two", "--num-rollout", 1, "--seed", 1)
    assert one.values() != two.values()
