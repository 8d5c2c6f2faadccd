"""Which of many engines has the least to do."""

from __future__ import annotations

from heapq import heapify, heappop, heappush


class LeastBusy:
    """The loads of engines 0 .. count - 1, and the least of those that are in, at a cost that grows with the logarithm of their number.

    A heap of (load, index), in which entries whose load is no longer true are passed over when they come up.
    """

    def __init__(self, count: int) -> None:
        self.loads = [0] * count
        self._in = set(range(count))
        self._heap = [(0, index) for index in range(count)]

    def change(self, index: int, by: int) -> None:
        self.loads[index] += by
        if index in self._in:
            heappush(self._heap, (self.loads[index], index))
            if len(self._heap) > 4 * len(self.loads) + 64:
                self._heap = [(self.loads[index], index) for index in self._in]
                heapify(self._heap)

    def put_in(self, index: int) -> None:
        """Idempotent."""
        self._in.add(index)
        heappush(self._heap, (self.loads[index], index))

    def take_out(self, index: int) -> None:
        """Idempotent."""
        self._in.discard(index)

    def least(self) -> int | None:
        """The index of the least load, the lowest among equals; None when none is in."""
        while self._heap:
            load, index = self._heap[0]
            if index in self._in and self.loads[index] == load:
                return index
            heappop(self._heap)
        return None
