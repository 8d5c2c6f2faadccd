"""remote: a reward server of your own, asked over HTTP."""

from __future__ import annotations

from typing import Any

from miles.config.reward import RewardSection
from miles.rewards.http import CONNECTIONS, JsonClient, checked_url
from miles.types import Sample


class RemoteReward:
    """POSTs {prompt, response, label, metadata} as JSON to `reward_url`; the answer is a number, null, or {"reward": ..., ...}."""

    def __init__(self, args: RewardSection):
        self.concurrency = CONNECTIONS
        self._client = JsonClient(checked_url(args.reward_url, "remote", "--reward-url", "http://localhost:8000/score"))

    async def __call__(self, sample: Sample) -> Any:
        body = {"prompt": sample.prompt, "response": sample.response, "label": sample.label, "metadata": sample.metadata}
        value = await self._client.post(body)
        if value is None or isinstance(value, int | float) or (isinstance(value, dict) and "reward" in value):
            return value
        raise ValueError(f'{self._client.url} answered {str(value)[:300]}, not a number or an object with "reward"')

    async def dispose(self) -> None:
        await self._client.dispose()
