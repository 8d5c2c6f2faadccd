"""The sizes that decode steps are captured for; the graphs themselves are tested on a GPU."""

from miles.engines.embedded.graphs import SHORTEST_CONTEXT, batch_size, context_size


def test_sizes_hold_what_they_are_for_and_are_few() -> None:
    sizes = [batch_size(rows) for rows in range(1, 257)]
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert all(size < rows * 1.5 for rows, size in enumerate(sizes, 1) if rows > 16)
    assert sizes == sorted(sizes)
    assert sorted(set(sizes)) == [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256]
    contexts = [context_size(tokens) for tokens in range(1, 5000)]
    assert all(context >= tokens for tokens, context in enumerate(contexts, 1))
    assert contexts[0] == SHORTEST_CONTEXT
    assert len(set(contexts)) == 7
