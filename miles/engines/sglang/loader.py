"""Runs inside the server: SGLang calls `load` for weights (its option --custom-weight-loader). One command a call, from `commands.py`.

The server receives buckets by itself, over the same transports as the embedded engine: nothing is copied on the way. They go to where
SGLang's own `load_weights` puts them, or through it where it does more than to copy; what then lies there is checksummed and
compared under its Hugging Face names.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
import socket
import traceback
from collections.abc import Sequence
from typing import Any

from sglang.srt.distributed import get_tp_group
from torch import Tensor, nn

from miles.engines.served_weights import ServedWeights
from miles.engines.sglang import seeds
from miles.engines.sglang.places import NamedShape, find_places
from miles.engines.sglang.sharded import ShardedWeights
from miles.types import PublishPlan

logger = logging.getLogger(__name__)

REPLY_SECONDS = 30.0


class ServerWeights:
    """The model of one rank. Its public methods are the commands; all ranks run each of them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._tensors: Sequence[NamedShape] = ()
        self._timeout = 0.0
        self._served: ServedWeights | None = None
        self._sharded: ShardedWeights | None = None
        self._addresses: list[int] = []

    def describe(self, tensors: Sequence[NamedShape], timeout: float, seeded: bool) -> dict[str, str]:
        """First: what a publish will bring, and whether requests have seeds.

        Raises:
            ValueError: the model does not take these tensors.
        """
        self._tensors, self._timeout = tensors, timeout
        if seeded:
            seeds.install()
        self._weights()
        return {}

    def begin(self, plan: PublishPlan, receiver_rank: int) -> dict[str, str]:
        self._receiver().begin(plan, receiver_rank)
        return {}

    def receive(self, index: int) -> dict[str, str]:
        self._receiver().receive(index)
        return {}

    def finish(self) -> dict[str, str]:
        return self._receiver().finish()

    def abort(self) -> dict[str, str]:
        self._receiver().abort()
        return {}

    def check(self, action: str, options: dict[str, Any]) -> dict[str, str]:
        if action == "checksum" and self._receiver() is self._sharded:
            raise ValueError("check_weights checksum: a tensor parallel engine has no whole tensors; every publish compares the parts")
        return self._weights().check(action, **options)

    def _receiver(self) -> ServedWeights | ShardedWeights:
        served = self._weights()
        return self._sharded or served

    def _weights(self) -> ServedWeights:
        """Found anew when SGLang has put its parameters elsewhere."""
        addresses = [parameter.data_ptr() for parameter in self.model.parameters()]
        if self._served is None or addresses != self._addresses:
            places, group = find_places(self.model, self._tensors), get_tp_group()
            if self._served is None:
                self._served = ServedWeights(places.views(), self._timeout, write=None if places.copied else self._write)
            else:
                self._served.moved(places.views())
            if group.world_size > 1:
                rank, share = group.rank_in_group, lambda bucket: group.broadcast(bucket, src=0)
                self._sharded = ShardedWeights(self._tensors, places, self._write, rank=rank, timeout=self._timeout, share=share)
            self._addresses = addresses
        return self._served

    def _write(self, tensors: Sequence[tuple[str, Tensor]]) -> None:
        self.model.load_weights(iter(tensors))  # type: ignore[operator]


_weights: dict[int, ServerWeights] = {}  # by model: a server may hold a draft model too
_last: dict[str, str] = {}  # the last command's id and answer: one that is sent again is not done again


def load(model: nn.Module, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Called by SGLang on every rank. The one tensor means nothing; its name is the command."""
    ((word, _),) = named_tensors
    command = json.loads(base64.b64decode(word))
    if _last.get("id") != command["id"]:
        _last.update(id=command["id"], answer=json.dumps(_run(model, command)))
    with socket.create_connection((command["host"], command["port"]), REPLY_SECONDS) as connection:
        connection.sendall(_last["answer"].encode())


def _run(model: nn.Module, command: dict[str, Any]) -> dict[str, Any]:
    weights = _weights.setdefault(id(model), ServerWeights(model))
    try:
        result = getattr(weights, command["method"])(**pickle.loads(base64.b64decode(command["arguments"])))
    except BaseException as error:  # carried over to the engine, whatever it is: here it would end the server
        logger.error("%s failed", command["method"], exc_info=error)
        return {"id": command["id"], "kind": type(error).__name__, "error": str(error), "traceback": traceback.format_exc()}
    return {"id": command["id"], "result": result}
