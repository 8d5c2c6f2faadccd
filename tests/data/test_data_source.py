import json
import logging
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from miles.data.data_source import DatasetSource
from miles.data.dataset import PromptRow
from miles.data.order import epoch_order
from miles.protocols import DataSource


def rows(count):
    return [PromptRow(f"p{i}", [7, i], str(i), {"at": [i]}, None, f"line {i + 1}") for i in range(count)]


def source(count, n=2, **settings_):
    made: DataSource = DatasetSource(rows(count), n, **{"seed": 1, **settings_})
    return made


def reference(count, draw, *, seed=1, shuffle=True):
    """What draw number `draw` is, from the definition."""
    epoch, place = divmod(draw, count)
    return int(epoch_order(count, seed, epoch)[place]) if shuffle else place


@given(count=st.integers(1, 40), epochs=st.integers(1, 4), shuffle=st.booleans(), seed=st.integers(0, 2**64 - 1))
@settings(max_examples=60, deadline=None)
def test_every_prompt_once_per_epoch(count, epochs, shuffle, seed):
    each = source(count, seed=seed, shuffle=shuffle, num_epoch=epochs)
    groups = []
    while (group := each.take()) is not None:
        groups.append(group)
    assert [group.group_index for group in groups] == list(range(count * epochs))
    for epoch in range(epochs):
        part = [group for group in groups if group.epoch == epoch]
        assert sorted(group.prompt_index for group in part) == list(range(count))
    assert each.take() is None


@pytest.mark.parametrize("count", [10, 1000])
def test_orders_differ_by_epoch_and_seed_and_are_fixed_for_ever(count):
    orders = {tuple(epoch_order(count, seed, epoch)) for seed in range(4) for epoch in range(4)}
    assert len(orders) == 16
    assert epoch_order(8, 0, 0).tolist() == [2, 6, 5, 3, 0, 4, 7, 1]
    assert epoch_order(8, 3, 5).tolist() == [5, 1, 0, 4, 3, 6, 2, 7]


def test_orders_are_fair():
    places = np.stack([epoch_order(4, 9, epoch) for epoch in range(4000)])
    for place in range(4):
        assert np.allclose(np.bincount(places[:, place], minlength=4) / 4000, 0.25, atol=0.03)


@pytest.mark.case("C27")
def test_more_prompts_asked_than_there_are():
    each = source(3)
    groups = [each.take() for _ in range(24)]
    assert Counter(group.prompt_index for group in groups) == {0: 8, 1: 8, 2: 8}
    assert all(sample.prompt and sample.prompt_ids for group in groups for sample in group.samples)
    assert len({tuple(group.prompt_index for group in groups[i : i + 3]) for i in range(0, 24, 3)}) > 1
    once = source(3, num_epoch=1)
    assert [once.take() is None for _ in range(5)] == [False] * 3 + [True] * 2


@pytest.mark.case("C49")
@pytest.mark.parametrize(("num_epoch", "draws"), [(None, 12), (3, 12), (1, 4), (2, 8)])
def test_the_walk_wraps_or_ends(num_epoch, draws):
    each = source(4, num_epoch=num_epoch)
    taken = [group for _ in range(12) if (group := each.take()) is not None]
    assert len(taken) == draws
    if num_epoch is not None and draws < 12:
        assert each.take() is None
        each.give_back(taken[1])
        assert each.take().group_index == 1
        assert each.take() is None


@pytest.mark.case("C63")
@given(data=st.data(), count=st.integers(1, 7), num_epoch=st.sampled_from([None, 1, 3]), shuffle=st.booleans())
@settings(max_examples=150, deadline=None)
def test_no_way_of_using_it_loses_or_repeats_a_draw(data, count, num_epoch, shuffle):
    """Against a model of what must hold: draws in flight, draws trained, and a state saved and loaded at any point."""
    each = source(count, num_epoch=num_epoch, shuffle=shuffle)
    total = None if num_epoch is None else num_epoch * count
    flying, trained, returned, attempts, following = {}, [], set(), Counter(), 0
    for _ in range(data.draw(st.integers(0, 40))):
        match data.draw(st.sampled_from(["take", "take", "give back", "train", "resume"])):
            case "take":
                group = each.take()
                if returned:
                    expected = min(returned)
                    returned.remove(expected)
                elif total is not None and following == total:
                    assert group is None
                    continue
                else:
                    expected, following = following, following + 1
                assert group.group_index == expected
                assert group.prompt_index == reference(count, expected, shuffle=shuffle)
                assert group.attempt == attempts[expected]
                flying[expected] = group
            case "give back" if flying:
                index = data.draw(st.sampled_from(sorted(flying)))
                each.give_back(flying.pop(index))
                returned.add(index)
                attempts[index] += 1
            case "train" if flying:
                index = data.draw(st.sampled_from(sorted(flying)))
                trained.append(index)
                del flying[index]
            case "resume":
                state = json.loads(json.dumps(each.state()))
                state["returned"] += [[index, attempts[index]] for index in flying]
                returned |= set(flying)
                flying = {}
                each = source(count, num_epoch=num_epoch, shuffle=shuffle)
                each.load_state(state)
    assert sorted([*trained, *flying, *returned]) == list(range(following))


@pytest.mark.case("C63")
def test_the_cursor_is_that_of_what_was_taken():
    each = source(1000)
    states = []
    for _ in range(4):
        for _ in range(32):
            each.take()
        states.append(each.state())
    resumed = source(1000)
    resumed.load_state(states[1])
    assert [resumed.take().group_index for _ in range(3)] == [64, 65, 66]


@pytest.mark.case("C65")
def test_a_cursor_at_the_end_of_an_epoch_goes_on_with_the_next():
    each = source(4, num_epoch=3)
    for _ in range(4):
        each.take()
    resumed = source(4, num_epoch=3)
    resumed.load_state(each.state())
    rest = []
    while (group := resumed.take()) is not None:
        rest.append(group.epoch)
    assert rest == [1] * 4 + [2] * 4


def test_groups_are_fresh():
    each = source(2, n=3, shuffle=False)
    first = each.take()
    assert [sample.sample_index for sample in first.samples] == [0, 1, 2]
    first.samples[0].prompt_ids.append(9)
    first.samples[0].metadata["at"].append(9)
    first.samples[1].reward = 1.0
    each.give_back(first)
    again = each.take()
    assert again.attempt == 1
    assert all(s.prompt_ids == [7, 0] and s.metadata == {"at": [0]} and s.reward is None for s in again.samples)
    assert [sample.sample_index for sample in each.take().samples] == [3, 4, 5]


def test_misuse_is_refused():
    each = source(3)
    group = each.take()
    each.give_back(group)
    with pytest.raises(ValueError, match="given back twice"):
        each.give_back(group)
    with pytest.raises(ValueError, match="never taken"):
        each.give_back(each.draw(2))
    with pytest.raises(ValueError, match="inconsistent"):
        each.load_state({"next_group_index": 2, "returned": [[2, 0]]})
    with pytest.raises(ValueError, match="inconsistent"):
        each.load_state({"next_group_index": 2, "returned": [[1, 0], [1, 1]]})
    with pytest.raises(ValueError, match="at least one prompt"):
        DatasetSource([], 2, seed=1)


def test_other_data_than_the_checkpoint_had_is_told(caplog):
    state = source(3).state()
    with caplog.at_level(logging.WARNING):
        source(3).load_state(state)
        assert not caplog.text
        source(4, seed=2).load_state(state)
    assert "rows 3 -> 4, seed 1 -> 2" in caplog.text
