"""Sets of moments as sorted, disjoint intervals [low, high)."""

from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(parts: Iterable[Interval], low: float = float("-inf"), high: float = float("inf")) -> list[Interval]:
    """What at least one of `parts` covers of [low, high)."""
    found: list[Interval] = []
    for start, end in sorted((max(start, low), min(end, high)) for start, end in parts):
        if end <= start:
            continue
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(found[-1][1], end))
        else:
            found.append((start, end))
    return found


def without(whole: Sequence[Interval], holes: Sequence[Interval]) -> list[Interval]:
    """What `holes` leave of `whole`; both are unions."""
    left: list[Interval] = []
    for start, end in whole:
        reached = start
        for low, high in holes:
            if high > reached and low < end:
                if low > reached:
                    left.append((reached, low))
                reached = high
        if end > reached:
            left.append((reached, end))
    return left


def total(parts: Iterable[Interval]) -> float:
    return sum(high - low for low, high in parts)
