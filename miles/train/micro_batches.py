"""Packs samples into micro-batches: rows of several samples each, in which equal beginnings are computed once.

A row is a prefix tree. Samples are sorted by their tokens, so that siblings lie side by side, and a sample adds only the
tokens that follow what it shares with its neighbour: the prompt, and whatever siblings wrote alike. A token sees its
ancestors and itself, and its position is its depth, so every number equals that of the sample computed alone, up to the
rounding of sums in another order. Without sharing, every sample is a tree of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from miles.config.run_config import RunConfig

ROW_CANDIDATES = 16


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward and backward pass.

    A *state* is a tree node whose next token is trained somewhere; an *edge* is one such next token after one state.
    Siblings that wrote the same token after the same words share an edge.
    """

    input_ids: Tensor  # int64 [rows, length]
    position_ids: Tensor  # int64 [rows, length]
    mask: Tensor | None  # bool [rows, 1, length, length]; None: kernels cut the row by restarting positions
    states: Tensor  # int64 [states], ascending: place in the flattened rows
    state_of: Tensor  # int64 [edges], ascending: index into states
    targets: Tensor  # int64 [edges] token ids
    edge_of: Tensor  # int64 [trained tokens] index into state_of
    tokens: Tensor  # int64 [trained tokens] place in the share's token columns
    num_nodes: int  # tokens really computed; the rest of rows x length is padding

    @property
    def num_trained(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device) -> MicroBatch:
        if device.type == "cpu":
            return self
        return MicroBatch(
            input_ids=self.input_ids.to(device),
            position_ids=self.position_ids.to(device),
            mask=None if self.mask is None else self.mask.to(device),
            states=self.states.to(device),
            state_of=self.state_of.to(device),
            targets=self.targets.to(device),
            edge_of=self.edge_of.to(device),
            tokens=self.tokens.to(device),
            num_nodes=self.num_nodes,
        )


@dataclass(frozen=True, slots=True)
class PackingRule:
    """How samples may be packed."""

    max_tokens: int  # rows x length of a micro-batch, unless one sample alone is longer
    share: bool  # compute equal beginnings once
    dense_mask: bool  # False: the attention kernel cuts a single row by its positions
    hidden_size: int  # tells how dear attention over a row is beside the rest of the model

    @classmethod
    def of(cls, args: RunConfig, hidden_size: int) -> PackingRule:
        masks = not args.attn_implementation.startswith("flash")
        return cls(args.max_tokens_per_micro_batch, args.share_prompts and masks, masks, hidden_size)


def pack(
    token_ids: np.ndarray, offsets: np.ndarray, loss_mask: np.ndarray, samples: Sequence[int] | np.ndarray, rule: PackingRule
) -> list[MicroBatch]:
    """Micro-batches that compute the trained tokens of `samples`, each exactly once.

    Args:
        token_ids: int32 [tokens], loss_mask: uint8 [tokens], offsets: int64 [samples + 1]: columns of a RolloutData.
        samples: the samples to pack, in any order; the result depends on the set alone.
    """
    chosen = [(int(s), token_ids[offsets[s] : offsets[s + 1]]) for s in sorted(int(s) for s in samples)]
    chosen = [(s, ids) for s, ids in chosen if loss_mask[offsets[s] + 1 : offsets[s + 1]].any()]
    if not chosen:
        return []
    if rule.share:
        chosen.sort(key=lambda item: item[1].astype(">u4").tobytes())
        shared = [0, *(_common_prefix(a[1], b[1]) for a, b in pairwise(chosen))]
    else:
        chosen.sort(key=lambda item: -len(item[1]))
        shared = [0] * len(chosen)
    lengths = [len(ids) for _, ids in chosen]
    rows = _plan_rows(lengths, shared, rule)
    trees = [_Tree([chosen[i] for i in row], [0 if k == 0 else shared[i] for k, i in enumerate(row)], loss_mask, offsets) for row in rows]
    trees.sort(key=lambda tree: -tree.size)
    batches, start = [], 0
    while start < len(trees):
        per_batch = max(1, rule.max_tokens // trees[start].size) if rule.dense_mask else 1
        left = len(trees) - start
        per_batch = -(-left // -(-left // per_batch))
        batches.append(_assemble(trees[start : start + per_batch], rule.dense_mask))
        start += per_batch
    return batches


def empty_micro_batch(dense_mask: bool) -> MicroBatch:
    """Two tokens that train nothing: what a rank computes while others still have work, so that collectives match."""
    return MicroBatch(
        input_ids=torch.zeros(1, 2, dtype=torch.long),
        position_ids=torch.arange(2)[None],
        mask=torch.ones(1, 1, 2, 2, dtype=torch.bool).tril() if dense_mask else None,
        states=torch.zeros(1, dtype=torch.long),
        state_of=torch.zeros(1, dtype=torch.long),
        targets=torch.zeros(1, dtype=torch.long),
        edge_of=torch.zeros(0, dtype=torch.long),
        tokens=torch.zeros(0, dtype=torch.long),
        num_nodes=0,
    )


def _common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    both = min(len(a), len(b))
    different = np.flatnonzero(a[:both] != b[:both])
    return int(different[0]) if len(different) else both


def _fill(lengths: list[int], shared: list[int], capacity: int) -> tuple[list[list[int]], list[int]]:
    """Rows of consecutive samples with at most `capacity` nodes, and each row's number of nodes."""
    rows: list[list[int]] = []
    sizes: list[int] = []
    for i, length in enumerate(lengths):
        added = length - shared[i]
        if rows and sizes[-1] + added <= capacity:
            rows[-1].append(i)
            sizes[-1] += added
        else:
            rows.append([i])
            sizes.append(length)
    return rows, sizes


def _plan_rows(lengths: list[int], shared: list[int], rule: PackingRule) -> list[list[int]]:
    """Longer rows share more and pad less, but attention costs more in them: try a few lengths, take the cheapest."""
    longest = max(lengths)
    if not rule.dense_mask:
        return _fill(lengths, shared, max(longest, rule.max_tokens))[0]
    best: tuple[float, list[list[int]]] | None = None
    for capacity in sorted({int(c) for c in np.geomspace(longest, max(longest, rule.max_tokens), ROW_CANDIDATES).round()}):
        rows, sizes = _fill(lengths, shared, capacity)
        sizes.sort(reverse=True)
        cost, start = 0.0, 0
        while start < len(sizes):
            per_batch = max(1, rule.max_tokens // sizes[start])
            left = len(sizes) - start
            per_batch = -(-left // -(-left // per_batch))
            count = len(sizes[start : start + per_batch])
            cost += count * sizes[start] * (1 + sizes[start] / (6 * rule.hidden_size))
            start += per_batch
        if best is None or cost < best[0] * 0.99:
            best = (cost, rows)
    assert best is not None
    return best[1]


class _Tree:
    """One row: the samples' nodes in order of first appearance."""

    def __init__(self, samples: list[tuple[int, np.ndarray]], shared: list[int], loss_mask: np.ndarray, offsets: np.ndarray) -> None:
        self.size = sum(len(ids) - lcp for (_, ids), lcp in zip(samples, shared, strict=True))
        self.ids = np.empty(self.size, dtype=np.int64)
        self.depth = np.empty(self.size, dtype=np.int64)
        self.branches: list[tuple[int, int, np.ndarray]] = []  # first new node, one past the last, ancestors of the first
        path = np.empty(0, dtype=np.int64)
        used = 0
        parents, children, tokens = [], [], []
        for (sample, ids), lcp in zip(samples, shared, strict=True):
            new = len(ids) - lcp
            self.ids[used : used + new] = ids[lcp:]
            self.depth[used : used + new] = np.arange(lcp, len(ids))
            ancestors = path[:lcp]
            self.branches.append((used, used + new, ancestors))
            path = np.concatenate([ancestors, np.arange(used, used + new)])
            used += new
            start = int(offsets[sample])
            trained = np.flatnonzero(loss_mask[start + 1 : start + len(ids)]) + 1
            parents.append(path[trained - 1])
            children.append(path[trained])
            tokens.append(start + trained)
        self.parents, self.children, self.tokens = np.concatenate(parents), np.concatenate(children), np.concatenate(tokens)

    def write_mask(self, mask: np.ndarray) -> None:
        """mask: bool [length, length], all False."""
        for start, end, ancestors in self.branches:
            mask[start:end, ancestors] = True
            new = end - start
            mask[start:end, start:end] = np.tri(new, dtype=bool)
        padding = np.arange(self.size, len(mask))
        mask[padding, padding] = True  # a row of the mask without any True would make NaN


def _assemble(trees: list[_Tree], dense_mask: bool) -> MicroBatch:
    length = max(tree.size for tree in trees)
    ids = np.zeros((len(trees), length), dtype=np.int64)
    positions = np.zeros((len(trees), length), dtype=np.int64)
    mask = np.zeros((len(trees), 1, length, length), dtype=bool) if dense_mask else None
    for row, tree in enumerate(trees):
        ids[row, : tree.size] = tree.ids
        positions[row, : tree.size] = tree.depth
        if mask is not None:
            tree.write_mask(mask[row, 0])
    parents = np.concatenate([tree.parents + row * length for row, tree in enumerate(trees)])
    children = np.concatenate([tree.children + row * length for row, tree in enumerate(trees)])
    # an edge is known by its child; edges in the order of their states, so that the output layer works in slices
    places = len(trees) * length
    edges, edge_of = np.unique(parents * places + children, return_inverse=True)
    states, state_of = np.unique(edges // places, return_inverse=True)
    return MicroBatch(
        input_ids=torch.from_numpy(ids),
        position_ids=torch.from_numpy(positions),
        mask=None if mask is None else torch.from_numpy(mask),
        states=torch.from_numpy(states),
        state_of=torch.from_numpy(state_of),
        targets=torch.from_numpy(ids.reshape(-1)[edges % places]),
        edge_of=torch.from_numpy(edge_of),
        tokens=torch.from_numpy(np.concatenate([tree.tokens for tree in trees])),
        num_nodes=sum(tree.size for tree in trees),
    )
