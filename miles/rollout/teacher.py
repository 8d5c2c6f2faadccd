"""A teacher that servers hold: what it would have said at each token of a sample, asked for as soon as the sample is written."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from typing import Any

from miles.engines.sglang.client import Client, ServerRefused
from miles.rollout.generate import EngineFailed, PromptRefused
from miles.types import Sample

TRIES = 3
"""Servers asked for one sample, one after another; the same one again where there is no other."""
PROBED = 256
"""Tokens whose text is compared at the start."""
FEW = 0.05
"""Of them may look different: libraries do not agree on the text of special tokens."""


class Teacher:
    """One teacher on one or several SGLang servers, each asked by the least busy of them. Log-probs are those at temperature 1."""

    def __init__(self, urls: Sequence[str], tokenizer: Any, timeout: float) -> None:
        """timeout: seconds for the question at the start; a sample's limit is that of its group."""
        self._clients = [Client(url, timeout=timeout) for url in urls]
        self._busy = [0] * len(urls)
        self._tokenizer, self._timeout = tokenizer, timeout

    async def check(self) -> None:
        """Called once, before the first sample.

        Raises:
            ValueError: names --teacher-urls and the server that does not answer, or reads other words in the same ids.
        """
        await asyncio.gather(*(self._check(client) for client in self._clients))

    async def _check(self, client: Client) -> None:
        last = len(self._tokenizer) - 1
        ids = sorted({round(last * place / (PROBED - 1)) for place in range(PROBED)})
        try:
            async with asyncio.timeout(self._timeout):
                entries = (await self._ask(client, ids, 0, texts=True))[1:]
        except (OSError, ServerRefused, KeyError, TypeError) as error:
            raise ValueError(f"--teacher-urls: {client.url} does not score tokens: {type(error).__name__}: {error}") from error
        texts = [(own, text or "", self._tokenizer.decode([own])) for own, (_, _, text) in zip(ids[1:], entries, strict=True)]
        different = [(own, theirs, ours) for own, theirs, ours in texts if theirs.strip() != ours.strip()]
        if len(different) > FEW * len(texts):
            own, theirs, ours = different[0]
            raise ValueError(
                f"--teacher-urls: the teacher at {client.url} has another tokenizer than --hf-checkpoint: of {len(texts)} tokens "
                f"{len(different)} are others, such as {own}, {theirs!r} there, and {ours!r} here"
            )

    async def score(self, sample: Sample) -> None:
        """Fill in sample.teacher_logprobs: [response tokens], each given all tokens before it.

        Raises:
            PromptRefused: a server says that this sample can never be scored.
            EngineFailed: no server did.
        """
        wanted, failures = sample.response_ids, []
        sample.teacher_logprobs = []
        asked: set[int] = set()
        while wanted:
            place = min(range(len(self._clients)), key=lambda one: (one in asked, self._busy[one], one))
            client = self._clients[place]
            asked.add(place)
            self._busy[place] += 1
            try:
                entries = await self._ask(client, sample.prompt_ids + wanted, len(sample.prompt_ids) - 1)
            except (OSError, ServerRefused) as error:
                if isinstance(error, ServerRefused) and error.status == 400:
                    raise PromptRefused(f"teacher at {client.url}: {error.message}") from error
                failures.append(f"{client.url}: {type(error).__name__}: {error}")
                if len(failures) == TRIES:
                    raise EngineFailed(f"the teacher scored nothing: {'; '.join(failures)}") from error
            else:
                sample.teacher_logprobs = _logprobs(entries[1:], wanted, client.url)
                return
            finally:
                self._busy[place] -= 1

    async def _ask(self, client: Client, ids: list[int], start: int, *, texts: bool = False) -> list[Any]:
        """[log-prob, id, text] of ids[start:]; the first has no log-prob."""
        payload = {
            "input_ids": ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": start,
            "return_text_in_logprobs": texts,
        }
        return list((await client.generate(payload))["meta_info"]["input_token_logprobs"])

    async def dispose(self) -> None:
        for client in self._clients:
            await client.close()


def _logprobs(entries: list[Any], wanted: list[int], url: str) -> list[float]:
    """Raises EngineFailed for the log-probs of other tokens, and for what is no number."""
    if [entry[1] for entry in entries] != wanted:
        raise EngineFailed(f"the teacher at {url} scored other tokens than it was sent")
    found = [math.nan if entry[0] is None else float(entry[0]) for entry in entries]
    if not all(map(math.isfinite, found)):
        raise EngineFailed(f"the teacher at {url}: its log-probs are not finite")
    return found
