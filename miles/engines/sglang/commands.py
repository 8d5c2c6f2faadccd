"""What is asked of the loader inside the server, and its answers.

A command goes through SGLang's own weight update, which runs it between two steps on every rank. That call can only say yes or
no, so each rank answers over a connection of its own to the engine.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
import secrets
from typing import Any

import torch

from miles.engines.sglang.client import Client, ServerRefused
from miles.engines.sglang.launcher import LOADER

ANSWER_SECONDS = 30.0  # an answer is sent before the call returns
KINDS: dict[str, type[Exception]] = {kind.__name__: kind for kind in (ValueError, TimeoutError, AssertionError, OSError)}


class Commands:
    """One server's loader.

    Args:
        ranks: processes of the server that hold weights; each answers.
        host: where they reach this process.
        timeout: seconds that a command may take.
    """

    def __init__(self, client: Client, *, ranks: int, host: str, timeout: float) -> None:
        self._client, self._ranks, self._host, self._timeout = client, ranks, host, timeout
        self._server: asyncio.Server | None = None
        self._answers: dict[str, asyncio.Queue[dict[str, Any]]] = {}

    async def run(self, method: str, *, weight_version: str | None = None, **arguments: Any) -> dict[str, str]:
        """Run one method of `ServerWeights` on every rank; what they return, together.

        Args:
            weight_version: the server's version from here on.

        Raises:
            what the method raised, as far as its type is known here, else RuntimeError.
        """
        command_id = secrets.token_hex(8)
        answers = self._answers[command_id] = asyncio.Queue()
        try:
            payload = self._payload(command_id, method, arguments, await self._port())
            if weight_version is not None:
                payload["weight_version"] = weight_version
            verdict = await self._client.post("/update_weights_from_tensor", payload, timeout=self._timeout)
            if not verdict["success"]:
                raise ServerRefused("/update_weights_from_tensor", 200, verdict["message"])
            async with asyncio.timeout(ANSWER_SECONDS):
                return _together([await answers.get() for _ in range(self._ranks)])
        finally:
            del self._answers[command_id]

    def _payload(self, command_id: str, method: str, arguments: dict[str, Any], port: int) -> dict[str, Any]:
        command = {
            "id": command_id,
            "method": method,
            "arguments": base64.b64encode(pickle.dumps(arguments)).decode(),
            "host": self._host,
            "port": port,
        }
        name = base64.b64encode(json.dumps(command).encode()).decode()
        tensors = base64.b64encode(pickle.dumps([(name, torch.zeros(1))])).decode()
        return {"serialized_named_tensors": [tensors] * self._ranks, "load_format": LOADER, "flush_cache": False}

    async def close(self) -> None:
        """Idempotent."""
        if self._server is not None:
            self._server.close()
            await self._server.wait_closed()
        self._server = None

    async def _port(self) -> int:
        if self._server is None:
            self._server = await asyncio.start_server(self._hear, "127.0.0.1" if self._host == "127.0.0.1" else "")
        return int(self._server.sockets[0].getsockname()[1])

    async def _hear(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One answer. Ids cannot be guessed, so nobody else's is taken."""
        try:
            answer = json.loads(await reader.read())
            if answer["id"] in self._answers:
                self._answers[answer["id"]].put_nowait(answer)
        except (OSError, ValueError, KeyError, TypeError):
            pass  # not an answer
        finally:
            writer.close()


def _together(answers: list[dict[str, Any]]) -> dict[str, str]:
    for answer in answers:
        if "error" in answer:
            kind = KINDS.get(answer["kind"])
            error = kind(answer["error"]) if kind is not None else RuntimeError(f"{answer['kind']}: {answer['error']}")
            error.add_note(f"In the SGLang server:\n{answer['traceback']}")
            raise error
    found: dict[str, str] = {}
    for answer in answers:
        for name, value in answer["result"].items():
            found[name] = value if found.get(name, value) == value else f"{found[name]}, {value}"
    return found
