"""remote: a reward server of your own, asked over HTTP."""

from __future__ import annotations

import asyncio
import weakref
from typing import Any

import httpx

from miles.config.reward import RewardSection
from miles.types import Sample

TRIES = 4
FIRST_PAUSE = 0.25
"""Seconds before the second try; doubled each time."""
CONNECT_TIMEOUT = 10.0
"""Seconds of one try to connect; the whole call is limited by the scorer."""
CONNECTIONS = 64


class RemoteReward:
    """POSTs {prompt, response, label, metadata} as JSON to `reward_url`; the answer is a number, null, or {"reward": ..., ...}.

    A refused or broken connection, a 429 and a 5xx are tried again; any other answer than 200 is a failure at once.
    All tries together have `reward_timeout` seconds, which the scorer holds.
    """

    def __init__(self, args: RewardSection):
        if not args.reward_url or not args.reward_url.startswith(("http://", "https://")):
            raise ValueError("--reward remote needs --reward-url, such as http://localhost:8000/score")
        self._url = args.reward_url
        self._clients: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, httpx.AsyncClient] = weakref.WeakKeyDictionary()

    async def __call__(self, sample: Sample) -> Any:
        body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label, "metadata": sample.metadata}
        pause = FIRST_PAUSE
        for last_try in [False] * (TRIES - 1) + [True]:
            try:
                answer = await self._client().post(self._url, json=body)
            except (httpx.TransportError, httpx.TimeoutException) as error:
                if last_try:
                    raise ConnectionError(f"{self._url} cannot be reached: {type(error).__name__}: {error}") from error
            else:
                if answer.status_code == 200:
                    return _read(self._url, answer)
                if last_try or not (answer.status_code == 429 or answer.status_code >= 500):
                    raise ConnectionError(f"{self._url} answered {answer.status_code}: {answer.text[:300]}")
            await asyncio.sleep(pause)
            pause *= 2
        raise AssertionError("unreachable")

    def _client(self) -> httpx.AsyncClient:
        """Connections belong to the loop that opened them."""
        loop = asyncio.get_running_loop()
        if loop not in self._clients:
            limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
            self._clients[loop] = httpx.AsyncClient(timeout=httpx.Timeout(None, connect=CONNECT_TIMEOUT), limits=limits)
        return self._clients[loop]

    async def dispose(self) -> None:
        """Close the connections of the running loop."""
        client = self._clients.pop(asyncio.get_running_loop(), None)
        if client is not None:
            await client.aclose()


def _read(url: str, answer: httpx.Response) -> Any:
    try:
        value = answer.json()
    except ValueError:
        raise ValueError(f"{url} answered with no JSON: {answer.text[:300]!r}") from None
    if value is None or isinstance(value, int | float) or (isinstance(value, dict) and "reward" in value):
        return value
    raise ValueError(f'{url} answered {str(value)[:300]}, not a number or an object with "reward"')
