"""The engine's heart, used by one thread: requests in, one step after another, finished sequences out."""

from __future__ import annotations

import math
import time

import torch
from transformers import PreTrainedModel

from miles.engines.embedded.attention import Batch
from miles.engines.embedded.cache import SlotCache
from miles.engines.embedded.fitting import fit_forward
from miles.engines.embedded.graphs import DecodeGraphs
from miles.engines.embedded.llama import LlamaForward
from miles.engines.embedded.model import move, probe_cache
from miles.engines.embedded.sampling import Draw, Drawn, sample
from miles.engines.embedded.scheduler import Plan, Scheduler
from miles.engines.embedded.sequence import Sequence
from miles.engines.embedded.stopping import Stopping


class Decoder:
    """Continuous batching over one model."""

    def __init__(
        self, model: PreTrainedModel, stopping: Stopping, *, max_running: int, max_context: int, prefill_tokens: int, cuda_graphs: bool
    ) -> None:
        self.model = model
        self.stopping = stopping
        self.max_context = max_context
        self.cache = SlotCache(probe_cache(model), max_running, max_context)
        self.forward = fit_forward(model, self.cache)
        graphed = cuda_graphs and model.device.type == "cuda" and isinstance(self.forward, LlamaForward)
        self.graphs = DecodeGraphs(self.forward, self.cache) if graphed else None
        self.scheduler = Scheduler(self.cache, max_running, prefill_tokens)
        self.version = 0
        self._poisoned = False
        self.num_sampled = 0
        self.last_progress = time.monotonic()

    @torch.inference_mode()
    def step(self) -> list[Sequence]:
        """One forward pass, at most one token for each sequence. Returns the sequences that it ended."""
        plan = self.scheduler.plan()
        if not plan:
            return []
        rows = self._compute(plan)
        self.scheduler.computed(plan)
        for sequence, drawn in rows:
            self._append(sequence, drawn)
        self.last_progress = time.monotonic()
        self.num_sampled += len(rows)
        return self.scheduler.retire()

    def _append(self, sequence: Sequence, drawn: Drawn) -> None:
        if math.isfinite(drawn.logprob):
            sequence.append(drawn.token, drawn.logprob, self.version)
            if drawn.likeliest is not None:
                sequence.likeliest.append(drawn.likeliest)
            self.stopping.check(sequence)
        else:
            self._poisoned = True
            place = f"token {sequence.num_written} of request {sequence.request.request_id}"
            sequence.failure = FloatingPointError(f"the model's logits for {place} are not finite (weight version {self.version})")

    def weights_changed(self, version: int) -> None:
        """The model computes with other weights from here on. Caches that are kept count as stale."""
        self.scheduler.weights_changed(self.version)
        self.version = version
        if self._poisoned:  # masked or not, a NaN in the cache spoils what reads it (0 x NaN)
            self.scheduler.forget_cache()
            self.cache.allocate()
            self._forget_graphs()
            self._poisoned = False

    def offload(self) -> None:
        """Free the cache and bring the weights to host memory. Running sequences will be prefilled anew."""
        self.scheduler.forget_cache()
        self._forget_graphs()
        self.cache.release()
        self._move(torch.device("cpu"))

    def onload(self, device: torch.device) -> None:
        self._move(device)
        self.cache.allocate()
        self.last_progress = time.monotonic()

    def _move(self, device: torch.device) -> None:
        if self.model.device.type != device.type:
            move(self.model, device)
            self.forward.rebind()
            torch.cuda.empty_cache()

    def _forget_graphs(self) -> None:
        if self.graphs is not None:
            self.graphs.forget()

    def _compute(self, plan: Plan) -> list[tuple[Sequence, Drawn]]:
        """Forward and sample: what was drawn for every chunk that reaches its sequence's end."""
        token_ids: list[int] = []
        ready: list[Sequence] = []
        keep: list[int] = []
        for chunk in plan.decodes + plan.prefills:
            sequence = self.scheduler.running[chunk.slot]
            token_ids += sequence.tokens[chunk.start : chunk.end]
            if chunk.end == len(sequence.tokens):
                ready.append(sequence)
                keep.append(len(token_ids) - 1)
        if self.graphs is not None and not plan.prefills and len(plan.decodes) == len(self.scheduler.running):
            logits = self.graphs(token_ids, [chunk.start for chunk in plan.decodes])
        else:
            batch = Batch.plan(self.cache, plan.decodes, plan.prefills)
            device = batch.positions.device
            logits = self.forward(torch.tensor(token_ids, device=device), batch, torch.tensor(keep, dtype=torch.long, device=device))
        if not ready:
            return []
        return list(zip(ready, sample(logits, [Draw(row.request.sampling, row.num_written) for row in ready]), strict=True))
