"""Finished groups in a checkpoint: what was generated, as columns and JSON; the prompts come from the data source again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from miles.data.rollout_data import pack
from miles.types import Likeliest, PromptGroup, Sample, SampleStatus, VersionSpan

DrawAgain = Callable[[int, int], PromptGroup]


def columns_of(groups: Sequence[PromptGroup]) -> dict[str, np.ndarray]:
    """The token columns of whole groups, by name. Log-probs are float32, as the trainer gets them."""
    data = pack(groups)
    told = {} if data.likeliest is None else {"likeliest_ids": data.likeliest.ids, "likeliest_logprobs": data.likeliest.logprobs}
    if data.teacher_logprobs is not None:
        told["teacher_logprobs"] = data.teacher_logprobs
    return told | {
        "token_ids": data.token_ids,
        "loss_mask": data.loss_mask,
        "rollout_logprobs": data.rollout_logprobs,
        "offsets": data.offsets,
        "prompt_lengths": data.prompt_lengths,
    }


def entry_of(group: PromptGroup) -> dict[str, Any]:
    """What the columns do not hold, as JSON values, which keep every float's bits."""
    return {"group_index": group.group_index, "attempt": group.attempt, "samples": [_sample_entry(sample) for sample in group.samples]}


def _sample_entry(sample: Sample) -> dict[str, Any]:
    return {
        "status": sample.status.value,
        "reward": sample.reward,
        "reward_details": sample.reward_details,
        "response": sample.response,
        "spans": [list(span) for span in sample.version_spans],
        "cache_spans": [list(span) for span in sample.cache_spans],
        "error": sample.error,
        "cached_tokens": sample.cached_tokens,
        "stale_cache_tokens": sample.stale_cache_tokens,
    }


def groups_of(entries: Sequence[dict[str, Any]], columns: dict[str, np.ndarray], draw: DrawAgain) -> list[PromptGroup]:
    """The groups again.

    Args:
        entries: in the order in which the columns were made.
        draw: (group_index, attempt) -> that group, empty.

    Raises:
        ValueError: entries and columns are not of the same groups.
    """
    offsets, place, groups = columns["offsets"], 0, []
    for entry in entries:
        group = draw(int(entry["group_index"]), int(entry["attempt"]))
        if len(group.samples) != len(entry["samples"]):
            raise ValueError(
                f"group {group.group_index} has {len(group.samples)} siblings now, and {len(entry['samples'])} in the checkpoint"
            )
        for sample, stored in zip(group.samples, entry["samples"], strict=True):
            _fill(sample, stored, columns, place)
            place += 1
        groups.append(group)
    if place + 1 != len(offsets):
        raise ValueError(f"the checkpoint has columns of {len(offsets) - 1} samples, and tells of {place}")
    return groups


def _fill(sample: Sample, stored: dict[str, Any], columns: dict[str, np.ndarray], place: int) -> None:
    start, end = (int(offset) for offset in columns["offsets"][place : place + 2])
    cut = start + int(columns["prompt_lengths"][place])
    sample.prompt_ids = columns["token_ids"][start:cut].tolist()
    sample.response_ids = columns["token_ids"][cut:end].tolist()
    sample.loss_mask = columns["loss_mask"][cut:end].tolist()
    sample.rollout_logprobs = columns["rollout_logprobs"][cut:end].tolist()
    if "likeliest_ids" in columns:
        sample.likeliest = Likeliest(columns["likeliest_ids"][cut:end], columns["likeliest_logprobs"][cut:end])
    if "teacher_logprobs" in columns:
        sample.teacher_logprobs = columns["teacher_logprobs"][cut:end].tolist()
    sample.version_spans = [VersionSpan(*span) for span in stored["spans"]]
    sample.cache_spans = [VersionSpan(*span) for span in stored["cache_spans"]]
    sample.status = SampleStatus(stored["status"])
    sample.reward, sample.reward_details = stored["reward"], stored["reward_details"]
    sample.response, sample.error = stored["response"], stored["error"]
    sample.cached_tokens, sample.stale_cache_tokens = stored["cached_tokens"], stored["stale_cache_tokens"]
