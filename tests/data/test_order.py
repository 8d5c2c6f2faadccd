from collections import Counter
from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.order import Order, epoch_order

SIZES = st.lists(st.integers(1, 30), min_size=1, max_size=4)
WEIGHTS = st.floats(0.01, 100)


@given(sizes=SIZES, seed=st.integers(0, 2**64 - 1), shuffle=st.booleans(), epoch=st.integers(0, 5))
@settings(max_examples=60, deadline=None)
def test_without_weights_every_row_of_every_set_comes_once(sizes, seed, shuffle, epoch):
    order = Order(tuple(sizes), seed, shuffle).epoch(epoch)
    assert order.tolist() == (epoch_order(sum(sizes), seed, epoch) if shuffle else np.arange(sum(sizes))).tolist()


@given(data=st.data(), sizes=SIZES, seed=st.integers(0, 2**32), shuffle=st.booleans())
@settings(max_examples=80, deadline=None)
def test_weights_are_shares_of_every_epoch_and_passes_leave_no_row_out(data, sizes, seed, shuffle):
    weights = data.draw(st.lists(WEIGHTS, min_size=len(sizes), max_size=len(sizes)))
    order = Order(tuple(sizes), seed, shuffle, tuple(weights))
    total, ends = sum(sizes), np.cumsum(sizes)
    quotas = order.quotas()
    assert sum(quotas) == total
    for quota, weight in zip(quotas, weights, strict=True):
        assert abs(quota - total * weight / sum(weights)) < 1
    walked = {number: [] for number in range(len(sizes))}
    for epoch in range(4):
        rows = order.epoch(epoch)
        of = np.searchsorted(ends, rows, "right")
        assert np.bincount(of, minlength=len(sizes)).tolist() == quotas
        for number in walked:
            walked[number] += rows[of == number].tolist()
    for number, rows in walked.items():
        first = int(ends[number]) - sizes[number]
        for start in range(0, len(rows) - sizes[number] + 1, sizes[number]):
            assert sorted(rows[start : start + sizes[number]]) == list(range(first, first + sizes[number]))


def test_sets_are_spread_over_the_epoch():
    rows = Order((90, 10), 0, False, (0.5, 0.5)).epoch(0)
    halves = [np.count_nonzero(part >= 90) for part in np.split(rows, 10)]
    assert halves == [5] * 10
    assert Counter(rows[rows >= 90].tolist()) == dict.fromkeys(range(90, 100), 5)


@given(sizes=SIZES, seed=st.integers(0, 99), weighted=st.booleans(), levels=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_easiest_come_first_and_ties_keep_their_order(sizes, seed, weighted, levels):
    total = sum(sizes)
    difficulty = np.random.default_rng(seed).integers(0, levels, total).astype(float)
    weights = tuple(map(float, sizes)) if weighted else None
    order = Order(tuple(sizes), seed, True, weights)
    rows, plain = order.epoch(2, difficulty), order.epoch(2)
    assert sorted(rows) == list(range(total))
    starts = np.cumsum([0, *sizes])
    for first, end in pairwise(starts) if weighted else [(0, total)]:
        own = [row for row in rows if first <= row < end]
        expected = sorted((row for row in plain if first <= row < end), key=lambda row: difficulty[row])
        assert own == expected
