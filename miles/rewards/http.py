"""JSON over HTTP to a server that scores: connections kept, passing trouble tried again."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import httpx

TRIES = 4
FIRST_PAUSE = 0.25
"""Seconds before the second try; doubled each time."""
CONNECT_TIMEOUT = 10.0
"""Seconds of one try to connect; the whole call is limited by the scorer."""
CONNECTIONS = 64


class JsonClient:
    """POSTs JSON to one URL. A refused or broken connection, a 429 and a 5xx are tried again; any other answer than 200 is a
    failure at once. All tries together have `reward_timeout` seconds, which the scorer holds."""

    def __init__(self, url: str, headers: dict[str, str] | None = None):
        self.url = url
        self._headers = headers or {}
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()

    async def post(self, body: Any) -> Any:
        """The answer, read as JSON.

        Raises:
            ConnectionError: no answer, or another than 200, after all tries.
            ValueError: the answer is no JSON.
        """
        pause = FIRST_PAUSE
        for last_try in [False] * (TRIES - 1) + [True]:
            try:
                answer = await self._client().post(self.url, json=body)
            except (httpx.TransportError, httpx.TimeoutException) as error:
                if last_try:
                    raise ConnectionError(f"{self.url} cannot be reached: {type(error).__name__}: {error}") from error
            else:
                if answer.status_code == 200:
                    return self._read(answer)
                if last_try or not (answer.status_code == 429 or answer.status_code >= 500):
                    raise ConnectionError(f"{self.url} answered {answer.status_code}: {answer.text[:300]}")
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def _read(self, answer: httpx.Response) -> Any:
        try:
            return answer.json()
        except ValueError:
            raise ValueError(f"{self.url} answered with no JSON: {answer.text[:300]!r}") from None

    def _client(self) -> httpx.AsyncClient:
        """Connections belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
            timeout = httpx.Timeout(None, connect=CONNECT_TIMEOUT)
            self._clients[loop] = httpx.AsyncClient(timeout=timeout, limits=limits, headers=self._headers)
        return self._clients[loop]

    async def dispose(self) -> None:
        """Close the connections of the running loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()


def checked_url(url: str | None, reward: str, flag: str, example: str) -> str:
    """The URL, if it is one. Raises ValueError with the flag's name."""
    if not url or not url.startswith(("http://", "https://")):
        raise ValueError(f"--reward {reward} needs {flag}, such as {example}")
    return url
