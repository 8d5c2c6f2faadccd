"""Refuses requests that can never work, before they can do harm to others."""

from __future__ import annotations

import math
from dataclasses import dataclass

from miles.types import GenerateRequest, SamplingParams


@dataclass(frozen=True, slots=True)
class Limits:
    """What this engine can serve."""

    vocabulary: int
    max_context: int
    has_tokenizer: bool

    def check(self, request: GenerateRequest) -> None:
        """Raises ValueError that names the request and all that is wrong with it."""
        faults = self._input_faults(request.input_ids) + self._sampling_faults(request.sampling)
        if faults:
            raise ValueError(f"request {request.request_id}: {'; '.join(faults)}")

    def _input_faults(self, input_ids: list[int]) -> list[str]:
        if not input_ids:
            return ["its input is empty"]
        faults = []
        bad = next((place for place, token in enumerate(input_ids) if not (isinstance(token, int) and 0 <= token < self.vocabulary)), None)
        if bad is not None:
            faults.append(f"token {input_ids[bad]!r} at place {bad} is not in the vocabulary of {self.vocabulary}")
        if len(input_ids) >= self.max_context:
            faults.append(f"{len(input_ids)} input tokens leave no room for a new one in --engine-max-context {self.max_context}")
        return faults

    def _sampling_faults(self, sampling: SamplingParams) -> list[str]:
        checks = {
            f"max_new_tokens {sampling.max_new_tokens} is below 1": sampling.max_new_tokens >= 1,
            f"temperature {sampling.temperature} is not a number from 0": math.isfinite(sampling.temperature) and sampling.temperature >= 0,
            f"top_p {sampling.top_p} is not above 0 and at most 1": 0 < sampling.top_p <= 1,
            f"top_k {sampling.top_k} is negative": sampling.top_k >= 0,
            f"min_p {sampling.min_p} is not from 0 to 1": 0 <= sampling.min_p <= 1,
            f"num_likeliest {sampling.num_likeliest} is not from 0 to the vocabulary of {self.vocabulary}": (
                0 <= sampling.num_likeliest <= self.vocabulary
            ),
            "a stop string is empty": all(sampling.stop),
            "stop strings need a tokenizer, and the checkpoint has none": self.has_tokenizer or not sampling.stop,
        }
        return [fault for fault, fine in checks.items() if not fine]
