"""HTTP to one server: pooled connections, limits on everything, patience with faults that pass."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from typing import Any

import aiohttp

logger = logging.getLogger(__name__)

PASSING = (502, 503, 504)
"""Answers of a server, or of a proxy before it, that another try may turn into a good one."""
KEEP_SECONDS = 2.0
"""For which an idle connection is used again: the server closes one after 5, and a request must not meet that."""
BACKOFF = 0.2  # seconds before the second try, doubled each time


class ServerRefused(RuntimeError):
    """The server answered, and said no."""

    def __init__(self, path: str, status: int, message: str) -> None:
        super().__init__(path, status, message)
        self.path, self.status, self.message = path, status, message

    def __str__(self) -> str:
        return f"SGLang answered {self.status} to {self.path}: {self.message}"


class Client:
    """One server's HTTP interface.

    As many connections as there are requests in flight: a request waits inside the server, which knows all of them, and not here.
    Control calls have connections of their own, so that a pause never waits behind generations.

    Args:
        url: http://host:port
        timeout: seconds of one control call, its tries together.
        tries: of one control call.
        check: called when a connection fails; raises when the server's process is gone.
    """

    def __init__(self, url: str, *, timeout: float, tries: int = 4, check: Callable[[], None] = lambda: None) -> None:
        self.url = url.rstrip("/")
        self._timeout, self._tries, self._check = timeout, tries, check
        self._generations: aiohttp.ClientSession | None = None
        self._control: aiohttp.ClientSession | None = None

    async def generate(self, payload: dict[str, Any]) -> dict[str, Any]:
        """POST /generate, once and without a limit: who asks has one.

        Raises:
            ServerRefused: the server said no.
            OSError: the connection failed.
        """
        if self._generations is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS)
            self._generations = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_connect=30))
        status, body = await self._exchange(self._generations, "POST", "/generate", payload)
        if status != 200:
            raise ServerRefused("/generate", status, _message(body))
        return dict(json.loads(body))

    async def get(self, path: str, timeout: float | None = None) -> Any:
        """One GET, without a second try: for probes."""
        status, body = await self._exchange(self._controls(), "GET", path, None, timeout or self._timeout)
        if status != 200:
            raise ServerRefused(path, status, _message(body))
        return json.loads(body) if body else None

    async def post(self, path: str, payload: dict[str, Any] | None = None, *, accept: tuple[int, ...] = (), timeout: float = 0.0) -> Any:
        """One control call. Faults that pass, and connections that break, are tried again a few times.

        Args:
            accept: statuses besides 200 that are fine; None is returned then.
            timeout: seconds, where it may take longer than usual.
        """
        async with asyncio.timeout(timeout or self._timeout):
            for attempt in range(1, self._tries + 1):
                last = attempt == self._tries
                try:
                    status, body = await self._exchange(self._controls(), "POST", path, payload or {})
                except OSError as error:
                    if last:
                        raise
                    logger.warning("%s%s failed and is tried again (%d of %d): %r", self.url, path, attempt, self._tries, error)
                else:
                    if status == 200:
                        return _parsed(body)
                    if status in accept:
                        return None
                    if status not in PASSING or last:
                        raise ServerRefused(path, status, _message(body))
                    logger.warning("%s%s answered %d and is tried again (%d of %d)", self.url, path, status, attempt, self._tries)
                await asyncio.sleep(BACKOFF * 2.0 ** (attempt - 1))
        raise AssertionError("the last try returns or raises")

    async def close(self) -> None:
        """Idempotent. Requests in flight fail."""
        for session in (self._generations, self._control):
            if session is not None:
                await session.close()
        self._generations = self._control = None

    def _controls(self) -> aiohttp.ClientSession:
        if self._control is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_SECONDS)
            self._control = aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=None))
        return self._control

    async def _exchange(
        self, session: aiohttp.ClientSession, method: str, path: str, payload: dict[str, Any] | None, timeout: float | None = None
    ) -> tuple[int, bytes]:
        """Status and body. Raises OSError, TimeoutError among them, whatever the library calls it, or what `check` raises."""
        limit = aiohttp.ClientTimeout(total=timeout) if timeout is not None else session.timeout
        try:
            async with session.request(method, self.url + path, json=payload, timeout=limit) as response:
                return response.status, await response.read()
        except (aiohttp.ClientError, ConnectionError) as error:
            self._check()
            if isinstance(error, OSError):
                raise
            raise ConnectionError(f"{self.url}{path}: {error!r}") from error


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def _message(body: bytes) -> str:
    """What an error's body says, in SGLang's several shapes."""
    found = _parsed(body)
    if isinstance(found, dict):
        inner = found.get("error", found)
        found = inner.get("message", inner) if isinstance(inner, dict) else inner
    return str(found)[:2000]
