"""The heap against a look at all engines."""

from hypothesis import given
from hypothesis import strategies as st

from miles.engines.least_busy import LeastBusy

EVENTS = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["more", "less", "in", "out"])), max_size=200)


@given(EVENTS)
def test_the_least_is_that_of_all_that_are_in(events: list[tuple[int, str]]) -> None:
    busy, loads, inside = LeastBusy(5), [0] * 5, set(range(5))
    for index, event in events:
        if event in ("more", "less"):
            by = 1 if event == "more" else -1
            loads[index] += by
            busy.change(index, by)
        elif event == "in":
            inside.add(index)
            busy.put_in(index)
        else:
            inside.discard(index)
            busy.take_out(index)
        assert busy.least() == min(inside, key=lambda each: (loads[each], each), default=None)
    assert busy.loads == loads


def test_it_does_not_grow_with_what_has_been() -> None:
    busy = LeastBusy(3)
    for _ in range(10_000):
        busy.change(1, 1)
        busy.change(1, -1)
    assert len(busy._heap) <= 4 * 3 + 64
