"""What the serving thread does. Every method runs on that thread, between two steps; health is read from elsewhere."""

from __future__ import annotations

import logging
import time
from typing import Any

import torch

from miles.config.run_config import RunConfig
from miles.engines.embedded.decoder import Decoder
from miles.engines.embedded.model import load_model, pick_device, vocabulary_of
from miles.engines.embedded.requests import Limits
from miles.engines.embedded.sequence import Reply, Sequence
from miles.engines.embedded.stopping import Stopping
from miles.engines.served_weights import ServedWeights
from miles.types import EngineHealth, FinishReason, GenerateRequest, PauseMode, PublishPlan

logger = logging.getLogger(__name__)


class EngineCore:
    """Model, decoder and weights of one engine, and whether it may decode now."""

    def __init__(self, args: RunConfig, name: str) -> None:
        self.args = args
        self.name = name
        self.decoder: Decoder | None = None  # from `load` on
        self.paused = False
        self.offloaded = False
        self.limits = Limits(vocabulary=0, max_context=args.engine_max_context, has_tokenizer=False)
        self.failure: BaseException | None = None
        self._unanswered: dict[Sequence, None] = {}  # in order of arrival
        self._tokens_cut = 0

    def load(self) -> None:
        args = self.args
        self.device = pick_device(args.device)
        torch.use_deterministic_algorithms(args.deterministic)
        if args.engine_threads is not None or (self.device.type == "cpu" and not args.colocate):
            torch.set_num_threads(args.engine_threads or 1)
        begin = time.monotonic()
        model = load_model(args.hf_checkpoint, args.dtype, self.device, trust_remote_code=args.trust_remote_code)
        stopping = Stopping.of(model, args.hf_checkpoint, trust_remote_code=args.trust_remote_code)
        self.weights = ServedWeights(dict(model.named_parameters()), args.publish_timeout)
        if args.check_weight_update_equal:
            self.weights.snapshot()
        self.limits = Limits(vocabulary_of(model), args.engine_max_context, stopping.tokenizer is not None)
        self.decoder = Decoder(
            model,
            stopping,
            max_running=args.engine_max_running,
            max_context=args.engine_max_context,
            prefill_tokens=args.engine_prefill_tokens,
            cuda_graphs=args.engine_cuda_graphs,
        )
        logger.info("engine %s: %s on %s, ready in %.1f s", self.name, type(model).__name__, self.device, time.monotonic() - begin)

    @property
    def ready(self) -> Decoder:
        assert self.decoder is not None, "init() comes first"
        return self.decoder

    @property
    def halted(self) -> bool:
        return self.decoder is None or self.paused or self.offloaded or not self.weights.intact

    def has_work(self) -> bool:
        return not self.halted and self.ready.scheduler.has_work()

    def step(self) -> None:
        self._hand_back(self.ready.step())

    def fail(self, error: BaseException) -> None:
        """A step or a queued job raised: nothing that runs can go on, and nobody may wait for ever."""
        logger.error("engine %s failed", self.name, exc_info=error)
        self.failure = error
        for sequence in self._unanswered:  # not the scheduler's: the error may have left its lists half changed
            self._tokens_cut += sequence.num_written
            sequence.reply(None, error)
        self._unanswered.clear()
        if self.decoder is not None:
            self.decoder.scheduler.cut_all()

    def submit(self, request: GenerateRequest, reply: Reply) -> None:
        if self.failure is not None:
            reply(None, self.failure)
            return
        decoder = self.ready
        sampling = request.sampling
        ends = frozenset(sampling.stop_token_ids) | (frozenset() if sampling.ignore_eos else decoder.stopping.eos_ids)
        longest = min(len(request.input_ids) + sampling.max_new_tokens, decoder.max_context)
        if not decoder.scheduler.running:
            decoder.last_progress = time.monotonic()
        sequence = Sequence(request, reply, max_tokens=longest, stop_ids=ends)
        try:
            decoder.scheduler.add(sequence)
        except ValueError as error:
            reply(None, ValueError(f"request {request.request_id}: {error}"))
        else:
            self._unanswered[sequence] = None

    def note_refused(self, request: GenerateRequest) -> None:
        """A request that was refused: its wave does not wait for it."""
        if request.wave is not None:
            try:
                self.ready.scheduler.note_arrival(request.wave)
            except ValueError as error:
                logger.warning("engine %s: refused request %s: %s", self.name, request.request_id, error)

    def abort(self, request_ids: frozenset[str] | None) -> int:
        """None: every request."""
        scheduler = self.ready.scheduler
        return self._hand_back(scheduler.cut_all() if request_ids is None else scheduler.cut(request_ids))

    def pause(self, mode: PauseMode) -> None:
        if mode not in ("retract", "in_place", "abort"):
            raise ValueError(f"pause mode {mode!r} is none of retract, in_place, abort")
        self.paused = True
        if mode == "retract":
            self.ready.scheduler.forget_cache()
        elif mode == "abort":
            running = frozenset(row.request.request_id for row in self.ready.scheduler.running)
            self._hand_back(self.ready.scheduler.cut(running, started_only=True))

    def resume(self) -> None:
        self.ready.last_progress = time.monotonic()
        self.weights.proven()
        self.paused = False

    def begin_update(self, plan: PublishPlan, receiver_rank: int) -> None:
        if not plan.staged:
            self._check_paused()
        if self.offloaded:
            raise RuntimeError(f"engine {self.name}: a publish needs its weights on the device; call onload first")
        if plan.version < self.ready.version:
            raise ValueError(f"engine {self.name}: weight version {plan.version} is older than its own, {self.ready.version}")
        self.weights.begin(plan, receiver_rank)

    def _check_paused(self) -> None:
        if not self.paused:
            raise RuntimeError(f"engine {self.name}: a publish needs a paused engine")

    def receive_bucket(self, index: int) -> None:
        self.weights.receive(index)

    def end_update(self) -> dict[str, str]:
        plan = self.weights.plan
        assert plan is not None, "end_update before begin_update"
        self._check_paused()
        checksums = self.weights.finish()
        self.ready.weights_changed(plan.version)
        return checksums

    def abort_update(self) -> None:
        self.weights.abort()

    def check_weights(self, action: str, options: dict[str, Any]) -> dict[str, str]:
        found = self.weights.check(action, **options)
        if action == "reset_tensors":
            self.ready.weights_changed(self.ready.version)
        return found

    def offload(self) -> None:
        """Free the cache; a GPU's weights go to host memory. Running requests are prefilled anew after onload."""
        if not self.offloaded:
            self.offloaded = True
            self.ready.offload()

    def onload(self) -> None:
        if self.offloaded:
            self.ready.onload(self.device)
            self.offloaded = False

    def dispose(self) -> None:
        if self.decoder is not None:
            self.abort(None)
            self.weights.dispose()
            self.decoder.cache.release()
        self.decoder = None

    def health(self, num_known: int, busy_seconds: float) -> EngineHealth:
        """Called from the event loop: reads a few numbers and waits for nothing.

        Args:
            num_known: requests sent and not answered.
            busy_seconds: how long the serving thread has been at one step or job.
        """
        decoder = self.decoder
        running = len(decoder.scheduler.running) if decoder else 0
        reason = self._unhealthy_because()
        return EngineHealth(
            healthy=not reason,
            weight_version=decoder.version if decoder else 0,
            running=running,
            waiting=max(0, num_known - running),
            paused=self.paused,
            stuck_seconds=self._stuck_seconds(busy_seconds),
            reason=reason,
            tokens=decoder.num_sampled if decoder else 0,
            tokens_cut=self._tokens_cut,
        )

    def _stuck_seconds(self, busy_seconds: float) -> float:
        """Since the last token, while requests run; and at least since the thread began what it is at, if that never ends."""
        decoder = self.decoder
        if decoder is None or self.halted:
            return 0.0
        return max(busy_seconds, time.monotonic() - decoder.last_progress if decoder.scheduler.running else 0.0)

    def _unhealthy_because(self) -> str:
        if self.failure is not None:
            return f"failed: {self.failure!r}"
        if self.decoder is None:
            return "not loaded"
        if not self.weights.intact and self.weights.plan is None:
            return "a publish was cut off half way or came out wrong: nothing is served until a whole one succeeds"
        return ""

    def _hand_back(self, sequences: list[Sequence]) -> int:
        for sequence in sequences:
            self._unanswered.pop(sequence, None)
            if sequence.failure is not None or sequence.finish is FinishReason.ABORT:
                self._tokens_cut += sequence.num_written
            if sequence.failure is not None:
                sequence.reply(None, sequence.failure)
            else:
                sequence.reply(sequence.completion(), None)
        return len(sequences)
