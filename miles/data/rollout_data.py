"""Finished groups into columns, and columns into one share per data-parallel rank."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from itertools import chain, pairwise
from typing import Any

import numpy as np

from miles.types import BatchColumns, Likeliest, PromptGroup, RolloutData, Sample, SampleStatus, TrainShare, VersionSpan

IMBALANCE_FOR_SIBLINGS = 1.05
"""A rank may get so many times the mean tokens to keep siblings, and so their shared prompt, together."""


def pack(groups: Sequence[PromptGroup]) -> RolloutData:
    """Samples of whole groups as columns, in the order given.

    Raises:
        ValueError: names the sample whose ids, mask, log-probs or version spans do not belong together. A pairing is
            never shifted or cut to fit.
    """
    samples = [sample for group in groups for sample in group.samples]
    for sample in samples:
        _check(sample)
    prompt_lengths = np.array([len(sample.prompt_ids) for sample in samples], np.int32)
    response_lengths = np.array([len(sample.response_ids) for sample in samples], np.int64)
    offsets = _offsets(prompt_lengths + response_lengths)
    total = int(offsets[-1])

    token_ids = _flat((part for s in samples for part in (s.prompt_ids, s.response_ids)), total, np.int32)
    in_response = _ranges(offsets[:-1] + prompt_lengths, response_lengths)  # [response tokens] places in the token columns
    loss_mask = np.zeros(total, np.uint8)
    loss_mask[in_response] = _flat((s.loss_mask for s in samples), len(in_response), np.uint8)
    rollout_logprobs = np.zeros(total, np.float32)
    rollout_logprobs[in_response] = _flat((s.rollout_logprobs for s in samples), len(in_response), np.float32)
    rollout_logprobs[loss_mask == 0] = 0.0
    weight_versions = _versions(samples, offsets[:-1] + prompt_lengths, total)
    weight_versions[loss_mask == 0] = -1

    data = RolloutData(
        token_ids=token_ids,
        loss_mask=loss_mask,
        rollout_logprobs=rollout_logprobs,
        weight_versions=weight_versions,
        offsets=offsets,
        prompt_lengths=prompt_lengths,
        rewards=np.array([np.nan if s.reward is None else s.reward for s in samples], np.float32),
        group_indices=np.array([s.group_index for s in samples], np.int64),
        sample_indices=np.array([s.sample_index for s in samples], np.int64),
        likeliest=_likeliest(samples, in_response, total),
        teacher_logprobs=_teacher_logprobs(samples, in_response, total),
    )
    _check_columns(data)
    return data


def _check(sample: Sample) -> None:
    tokens = len(sample.response_ids)
    name = _name(sample.sample_index, sample.group_index)
    if len(sample.loss_mask) != tokens or len(sample.rollout_logprobs) != tokens:
        raise ValueError(
            f"{name}: {tokens} response ids, {len(sample.loss_mask)} mask entries and "
            f"{len(sample.rollout_logprobs)} log-probs do not pair up"
        )
    if not sample.prompt_ids:
        raise ValueError(f"{name} has no prompt tokens")
    if sample.likeliest is not None and (len(sample.likeliest.ids), len(sample.likeliest.logprobs)) != (tokens, tokens):
        raise ValueError(f"{name}: {len(sample.likeliest.ids)} rows of likeliest tokens for {tokens} response ids")
    if sample.teacher_logprobs is not None and len(sample.teacher_logprobs) != tokens:
        raise ValueError(f"{name}: {len(sample.teacher_logprobs)} log-probs of the teacher for {tokens} response ids")
    reached = 0
    for span in sample.version_spans:
        if not reached <= span.start <= span.end <= tokens:
            raise ValueError(f"{name}: version spans {sample.version_spans} do not fit {tokens} tokens")
        reached = span.end


def _name(sample_index: int, group_index: int) -> str:
    return f"sample {sample_index} of group {group_index}"


def _check_columns(data: RolloutData) -> None:
    problems = {
        "a mask that is neither 0 nor 1": data.loss_mask > 1,
        "a log-prob that is no number": ~np.isfinite(data.rollout_logprobs),
        "a log-prob above 0": data.rollout_logprobs > 1e-3,
        "a negative token id": data.token_ids < 0,
    }
    for what, wrong in problems.items():
        if wrong.any():
            place = int(np.argmax(wrong))
            sample = int(np.searchsorted(data.offsets, place, "right")) - 1
            raise ValueError(
                f"{_name(data.sample_indices[sample], data.group_indices[sample])}: {what}, at token {place - data.offsets[sample]}"
            )
    if np.isinf(data.rewards).any():
        sample = int(np.argmax(np.isinf(data.rewards)))
        raise ValueError(f"{_name(data.sample_indices[sample], data.group_indices[sample])}: an infinite reward")


def split(data: RolloutData, num_shares: int, samples_per_step: int, rollout_id: int, weight_version: int) -> list[TrainShare]:
    """Deal the samples of each optimizer step to the ranks with about equal token counts, siblings together where that balances.

    Steps are cut in training order, `samples_per_step` samples each; the last may be shorter. Every sample is in exactly
    one share. A rank is left without samples in a step only when the step has fewer samples than ranks.
    """
    assert num_shares >= 1
    assert samples_per_step >= 1
    lengths = np.diff(data.offsets)
    step_of = (np.arange(data.num_samples) // samples_per_step).astype(np.int32)
    num_steps = int(step_of[-1]) + 1 if data.num_samples else 0
    own: list[list[np.ndarray]] = [[] for _ in range(num_shares)]
    for step in range(num_steps):
        members = np.flatnonzero(step_of == step)
        for rank, part in enumerate(_deal(members, lengths[members], data.group_indices[members], num_shares)):
            own[rank].append(part)
    trained = sums(data.loss_mask.astype(np.int64), data.offsets)
    trained[np.isnan(data.rewards)] = 0
    batch = BatchColumns(data.rewards, data.group_indices, trained, step_of)
    shares = []
    for parts in own:
        positions = np.concatenate(parts) if parts else np.zeros(0, np.int64)
        shares.append(TrainShare(rollout_id, select(data, positions), positions, batch, num_steps, weight_version))
    return shares


def _deal(members: np.ndarray, lengths: np.ndarray, groups: np.ndarray, num_shares: int) -> list[np.ndarray]:
    """Largest first to the least loaded: whole groups while the rank stays near the mean, else their samples one by one."""
    if num_shares == 1:
        return [members]
    limit = IMBALANCE_FOR_SIBLINGS * lengths.sum() / num_shares
    cuts = np.flatnonzero(np.diff(groups)) + 1
    siblings = np.split(np.arange(len(members)), cuts)
    parts = _lightest_first(siblings, lengths, num_shares, limit)
    if sum(map(bool, parts)) < min(len(members), num_shares):
        parts = _lightest_first(siblings, lengths, num_shares, 0.0)
    return [members[np.sort(np.asarray(part, np.int64))] for part in parts]


def _lightest_first(siblings: list[np.ndarray], lengths: np.ndarray, num_shares: int, limit: float) -> list[list[int]]:
    parts: list[list[int]] = [[] for _ in range(num_shares)]
    loads = [(0, rank) for rank in range(num_shares)]
    singles: list[int] = []
    for group in sorted(siblings, key=lambda group: -int(lengths[group].sum())):
        size = int(lengths[group].sum())
        load, rank = loads[0]
        if load + size > limit:
            singles.extend(group.tolist())
            continue
        parts[rank].extend(group.tolist())
        heapq.heapreplace(loads, (load + size, rank))
    for sample in sorted(singles, key=lambda sample: -int(lengths[sample])):
        load, rank = loads[0]
        parts[rank].append(sample)
        heapq.heapreplace(loads, (load + int(lengths[sample]), rank))
    return parts


def select(data: RolloutData, positions: np.ndarray) -> RolloutData:
    """The samples at `positions`, in that order."""
    lengths = np.diff(data.offsets)[positions]
    tokens = _ranges(data.offsets[:-1][positions], lengths)
    return RolloutData(
        token_ids=data.token_ids[tokens],
        loss_mask=data.loss_mask[tokens],
        rollout_logprobs=data.rollout_logprobs[tokens],
        weight_versions=data.weight_versions[tokens],
        offsets=_offsets(lengths),
        prompt_lengths=data.prompt_lengths[positions],
        rewards=data.rewards[positions],
        group_indices=data.group_indices[positions],
        sample_indices=data.sample_indices[positions],
        likeliest=None if data.likeliest is None else Likeliest(data.likeliest.ids[tokens], data.likeliest.logprobs[tokens]),
        teacher_logprobs=None if data.teacher_logprobs is None else data.teacher_logprobs[tokens],
    )


def unpack_sample(data: RolloutData, place: int) -> Sample:
    """One sample as a carrier again, for debugging; what columns do not hold (texts, label, metadata) is empty."""
    start, end = (int(offset) for offset in data.offsets[place : place + 2])
    cut = start + int(data.prompt_lengths[place])
    versions = data.weight_versions[cut:end]
    edges = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), len(versions)] if len(versions) else [0]
    reward = float(data.rewards[place])
    return Sample(
        sample_index=int(data.sample_indices[place]),
        group_index=int(data.group_indices[place]),
        prompt="",
        prompt_ids=data.token_ids[start:cut].tolist(),
        response_ids=data.token_ids[cut:end].tolist(),
        loss_mask=data.loss_mask[cut:end].tolist(),
        rollout_logprobs=data.rollout_logprobs[cut:end].tolist(),
        version_spans=[VersionSpan(a, b, int(versions[a])) for a, b in pairwise(edges) if versions[a] >= 0],
        likeliest=None if data.likeliest is None else Likeliest(data.likeliest.ids[cut:end], data.likeliest.logprobs[cut:end]),
        teacher_logprobs=None if data.teacher_logprobs is None else data.teacher_logprobs[cut:end].tolist(),
        status=SampleStatus.COMPLETED,
        reward=None if np.isnan(reward) else reward,
    )


def sums(values: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Sum of each sample's slice of a token column, [samples]; empty slices give 0."""
    running = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    return running[offsets[1:]] - running[offsets[:-1]]


def _offsets(lengths: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """starts[0] .. starts[0] + lengths[0] - 1, starts[1] .., int64."""
    ends = np.cumsum(lengths, dtype=np.int64)
    total = int(ends[-1]) if len(ends) else 0
    return np.arange(total, dtype=np.int64) + np.repeat(np.asarray(starts, np.int64) - (ends - lengths), lengths)


def _flat(parts: Iterable[Sequence[Any]], total: int, dtype: Any) -> np.ndarray:
    return np.fromiter(chain.from_iterable(parts), dtype, count=total)


def _likeliest(samples: Sequence[Sample], in_response: np.ndarray, total: int) -> Likeliest | None:
    """Of all tokens, where the samples that have any tokens know theirs. Raises ValueError where only some do."""
    known = [s for s in samples if s.likeliest is not None]
    if not known:
        return None
    if lacking := [s for s in samples if s.response_ids and s.likeliest is None]:
        raise ValueError(f"{_name(lacking[0].sample_index, lacking[0].group_index)} has no likeliest tokens, which others have")
    width = known[0].likeliest.ids.shape[1]  # type: ignore[union-attr]
    columns = Likeliest(np.zeros((total, width), np.int32), np.zeros((total, width), np.float32))
    columns.ids[in_response] = np.concatenate([s.likeliest.ids for s in known])  # type: ignore[union-attr]
    columns.logprobs[in_response] = np.concatenate([s.likeliest.logprobs for s in known])  # type: ignore[union-attr]
    return columns


def _teacher_logprobs(samples: Sequence[Sample], in_response: np.ndarray, total: int) -> np.ndarray | None:
    """Of all tokens, where any sample was scored by a teacher; then every one with tokens must have been."""
    if all(s.teacher_logprobs is None for s in samples):
        return None
    if lacking := [s for s in samples if s.response_ids and s.teacher_logprobs is None]:
        raise ValueError(f"{_name(lacking[0].sample_index, lacking[0].group_index)} has no log-probs of the teacher, which others have")
    column = np.zeros(total, np.float32)
    column[in_response] = _flat((s.teacher_logprobs or [] for s in samples), len(in_response), np.float32)
    return column


def _versions(samples: Sequence[Sample], starts: np.ndarray, total: int) -> np.ndarray:
    spans = [(place, *span) for place, sample in enumerate(samples) for span in sample.version_spans]
    versions = np.full(total, -1, np.int32)
    if spans:
        owner, start, end, version = np.array(spans, np.int64).T
        versions[_ranges(starts[owner] + start, end - start)] = np.repeat(version, end - start)
    return versions
