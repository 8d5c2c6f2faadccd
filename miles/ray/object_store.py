"""Where rollout shares and critic values lie between processes: Ray's object store, or this process's memory."""

from __future__ import annotations

import itertools
import os
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import ray
from ray._private import worker as ray_worker

from miles.types import ObjectRef

_numbers = itertools.count()
_GET_LIMIT = 120.0


class RayRef:
    """Keeps one object of Ray's store alive. Freeing empties it, whoever else still holds it in this process."""

    __slots__ = ("__weakref__", "ref")

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __reduce__(self) -> tuple[Any, ...]:
        return RayRef, (self.ref,)


class RayStore:
    """Ray's shared memory, which drops an object with the last reference to it.

    So a ref that leaves this process belongs to whoever receives it: the receiver adopts it, and this store forgets it.
    """

    def __init__(self) -> None:
        self._held: weakref.WeakValueDictionary[str, RayRef] = weakref.WeakValueDictionary()

    def __reduce__(self) -> tuple[Any, ...]:
        return RayStore, ()

    def put(self, value: Any) -> ObjectRef:
        ref = ObjectRef(f"{os.getpid()}-{next(_numbers)}", RayRef(ray.put(value)))
        self._held[ref.key] = ref.handle
        return ref

    def get(self, ref: ObjectRef) -> Any:
        if ref.handle.ref is None:
            raise KeyError(f"object {ref.key} is not in the store: it was freed")
        # Trainers call this from their compute thread, which Ray cannot tell from blocking the event loop.
        ray_worker.blocking_get_inside_async_warned = True
        try:
            return ray.get(ref.handle.ref, timeout=_GET_LIMIT)
        except (ray.exceptions.ObjectLostError, ray.exceptions.GetTimeoutError) as error:
            raise KeyError(f"object {ref.key} is not in the store: freed, or its owner is gone ({type(error).__name__})") from None

    def adopt(self, refs: Sequence[ObjectRef]) -> None:
        """Count refs that came from another process as held here."""
        self._held.update((ref.key, ref.handle) for ref in refs)

    def free(self, refs: Sequence[ObjectRef]) -> None:
        for ref in refs:
            ref.handle.ref = None
            self._held.pop(ref.key, None)

    def count(self) -> int:
        return len(self._held)


class ProcessStore:
    """Objects in this process. What comes out is a copy of the object around read-only views of its arrays, as from Ray's store."""

    def __init__(self) -> None:
        self._objects: dict[str, tuple[bytes, list[memoryview]]] = {}

    def put(self, value: Any) -> ObjectRef:
        ref = ObjectRef(f"{os.getpid()}-{next(_numbers)}")
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
        self._objects[ref.key] = data, [buffer.raw().toreadonly() for buffer in buffers]
        return ref

    def get(self, ref: ObjectRef) -> Any:
        if ref.key not in self._objects:
            raise KeyError(f"object {ref.key} is not in the store: it was freed")
        data, buffers = self._objects[ref.key]
        return pickle.loads(data, buffers=buffers)

    def adopt(self, refs: Sequence[ObjectRef]) -> None:
        """They are here already."""

    def free(self, refs: Sequence[ObjectRef]) -> None:
        for ref in refs:
            self._objects.pop(ref.key, None)

    def count(self) -> int:
        return len(self._objects)
