"""The rollout side's conductor: prompts go in, references to training data come out."""

from __future__ import annotations

import asyncio
import gc
import logging
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, TypeVar

from miles.config.run_config import RunConfig
from miles.data.mix import load_source
from miles.data.rollout_data import pack, split
from miles.data.tokenizer import load_tokenizer
from miles.engines.router import Router
from miles.fault_tolerance.kill_points import reached
from miles.protocols import Engine, ObjectStore, RolloutFn
from miles.rewards.reward import RewardScorer
from miles.rollout.context import RolloutContext, train_sampling
from miles.rollout.evaluate import Evaluator
from miles.rollout.filters import load_filter
from miles.rollout.first_rollout import WatchedRouter, check_exchanges, check_gold
from miles.rollout.functions import load_rollout_function
from miles.rollout.generate import build_generate, load_generate, single_turn
from miles.rollout.group import cut_off
from miles.rollout.made_with import made_with
from miles.rollout.metrics import rollout_metrics, without_marker
from miles.rollout.sample_log import write_samples
from miles.rollout.saves import KeepsState, Saves
from miles.rollout.state import Drained, write
from miles.rollout.teacher import Teacher
from miles.rollout.verdicts import Verdicts
from miles.tracking.clock import now
from miles.tracking.ledger import Ledger
from miles.types import EvalResult, PromptGroup, RolloutDataRef, RolloutOutput

logger = logging.getLogger(__name__)
T = TypeVar("T")


class RolloutExecutor:
    """Lives in a process of its own, on one event loop; holds no GPU.

    Construction reads the tokenizer, the data and every plug, so that what is wrong with them is said before an engine starts.
    """

    def __init__(self, args: RunConfig, store: ObjectStore):
        self.args = args
        self.store = store
        self.tokenizer = load_tokenizer(args)
        self.data = load_source(args, self.tokenizer)
        self.make_rollout_fn = load_rollout_function(args)
        self.ledger = Ledger(Path(args.run_dir) / "ledger.jsonl")
        self.context = RolloutContext(
            args=args,
            data=self.data,
            tokenizer=self.tokenizer,
            scorer=RewardScorer(args),
            ledger=self.ledger,
            generate=single_turn,
            sampling=train_sampling(args),
            seed=args.seed,
            verdicts=Verdicts(args, load_filter(args.group_filter), self.ledger),
            num_rollout=self._num_rollout(),
            group_limit=args.sample_timeout,
        )
        self.teacher = Teacher(args.teacher_urls, self.tokenizer, args.control_timeout) if args.teacher_urls else None
        self.context.generate = build_generate(load_generate(args.generate_function), self.context)
        self.evaluator = Evaluator(args, self.context)
        self.router: Router | None = None
        self.rollout_fn: RolloutFn | None = None
        self.weight_version = 0
        self.watched: WatchedRouter | None = None  # until the first rollout is checked
        self.saves = Saves(self.context, made_with(args, self.data.identity()))
        self.stored: dict[int, RolloutDataRef] = {}  # rollouts handed out and not yet known to be trained
        self.calls: set[asyncio.Task[Any]] = set()
        self.disposed = False

    async def init(self, engines: list[Engine]) -> None:
        """Called once the engines are there; they may be stopped and started again behind their handles."""
        if not engines:
            raise ValueError("--num-engines: the rollout side needs at least one engine")
        restart = self.args.worker_start_timeout + self.args.engine_start_timeout
        self.router = Router(engines, max_running=2 * self.args.engine_max_running, patience=restart)
        for context in (self.context, self.evaluator.context):
            context.router, context.num_engines = self.router, len(engines)
        if self.teacher is not None:
            await self.teacher.check()
            self.context.teacher = self.teacher
        if self.args.verify_first_step and self.args.load is None:
            self.context.router = self.watched = WatchedRouter(self.router)
        self.rollout_fn = self.saves.function = self.make_rollout_fn(self.args, self.context)
        gc.freeze()  # what is loaded by now stays: collections need not walk the data set and the libraries again and again
        gc.set_threshold(50_000, 20, 20)  # little of it is cyclic: with Python's own thresholds a third of the time was spent on looking

    def _num_rollout(self) -> int:
        if self.args.num_rollout is not None:
            return self.args.num_rollout
        if self.args.num_epoch is None:
            raise ValueError("give --num-rollout or --num-epoch: one of them says when the run ends")
        return self._rollouts_per_epoch() * self.args.num_epoch

    def _rollouts_per_epoch(self) -> int:
        rows, size = self.data.rows(), self.args.rollout_batch_size
        if rows < size:
            raise too_few(self.args, rows)
        return rows // size

    async def num_rollout_per_epoch(self) -> int:
        """floor(rows / rollout_batch_size). Raises ValueError when that is 0."""
        return self._rollouts_per_epoch()

    async def get(self, rollout_id: int) -> RolloutDataRef:
        """One rollout, packed, split among the trainers and stored.

        Raises:
            TimeoutError: generate_timeout passed; says what is in flight.
            Exception: the first fault of anything that took part, as it was raised.
        """
        self.saves.asked.add(rollout_id)
        try:
            done = self.saves.ready.pop(rollout_id, None)
            if done is None:
                output = await self._call(self._generate(rollout_id))
                if self.watched is not None:
                    output.metrics |= await self._call(self._check_first(output.groups, self.watched))
                done = Drained(rollout_id, self.weight_version, output)
            ref = self._store(done)
        except BaseException as error:
            self.saves.fail(error)
            raise
        self.saves.note_drained(done)
        return ref

    def _left_out(self) -> dict[str, float]:
        return {"rollout/prompts_left_out": float(self.data.num_left_out)} if self.data.num_left_out else {}

    def _store(self, done: Drained) -> RolloutDataRef:
        groups, version, args = done.output.groups, done.weight_version, self.args
        ready = now()
        data = pack(groups)
        shares = split(data, args.num_trainers, args.samples_per_step, done.rollout_id, version)
        ref = RolloutDataRef(
            rollout_id=done.rollout_id,
            shares=[self.store.put(share) for share in shares],
            num_samples=data.num_samples,
            metrics=rollout_metrics(groups, data, version) | done.output.metrics | self._left_out(),
            group_indices=[group.group_index for group in groups],
            times=[group.times for group in groups],
            ready=ready,
        )
        for reward in without_marker(ref.metrics):
            logger.warning("rollout %d: no answer has the marker that %s looks for, so each scores as if wrong", done.rollout_id, reward)
        self.stored[done.rollout_id] = ref
        for group in groups:
            if group.group_index not in self.ledger.books.stage:  # a function of the user's own, which may not know of ledgers
                self.ledger.note("taken", group.group_index, prompt=group.prompt_index, epoch=group.epoch)
        self.ledger.note_all("drained", ref.group_indices, rollout_id=done.rollout_id, version=version)
        path = Path(args.run_dir) / "samples" / f"rollout_{done.rollout_id}.jsonl"
        write_samples(path, groups, args.save_samples, self.tokenizer)
        reached(args, "drained", done.rollout_id)
        return ref

    async def _generate(self, rollout_id: int) -> RolloutOutput:
        assert self.rollout_fn is not None, "init(engines) comes before get"
        limit = self.args.generate_timeout
        task = asyncio.ensure_future(self.rollout_fn(rollout_id))
        try:
            if not (await asyncio.wait({task}, timeout=limit))[0]:
                seen = await self.stats()
                raise TimeoutError(f"rollout {rollout_id} took longer than --generate-timeout {limit:g} s; in flight: {seen}")
        finally:
            await cut_off([task])
        output = task.result()
        if len(output.groups) != self.args.rollout_batch_size:
            raise ValueError(
                f"--rollout-function gave {len(output.groups)} groups, not --rollout-batch-size {self.args.rollout_batch_size}"
            )
        return output

    async def _check_first(self, groups: list[PromptGroup], watched: WatchedRouter) -> dict[str, float]:
        self.watched = None
        metrics = check_exchanges(groups, watched.stop(), self.args) | await check_gold(groups, self.context.scorer, self.args)
        logger.info("first rollout: ids, log-probs and sampling are those of the engines: %s", metrics)
        return metrics

    async def eval(self, rollout_id: int, hf_dir: str | None = None) -> EvalResult:
        """Evaluate all sets at the current weights, or `hf_dir` in snapshot mode. Failures are reasons in the result."""
        return await self._call(self.evaluator(rollout_id, hf_dir, self.weight_version))

    async def report_eval_skip(self, rollout_id: int, reason: str) -> None:
        """An evaluation that was never started; whoever dispatches logs the missing point."""
        logger.warning("no evaluation at rollout %d: %s", rollout_id, reason)

    async def quiet(self) -> None:
        """Before every publish: waits for answers that must not mix two versions."""
        if isinstance(self.rollout_fn, KeepsState):
            await self._call(self.rollout_fn.quiet())

    async def set_weight_version(self, version: int) -> None:
        """After every publish: what is drained from now on is as old as its distance to `version`."""
        if version < self.weight_version:
            raise ValueError(f"weight version {version} after {self.weight_version}: versions never go backwards")
        self.weight_version = version
        self.context.weight_version = version
        if self.rollout_fn is not None:
            self.rollout_fn.set_weight_version(version)

    async def set_engine_live(self, index: int, live: bool) -> None:
        """Told by whoever watches the engines: one that is not live gets nothing new."""
        if self.router is not None:
            self.router.mark(index, live=live)

    async def note_trained(self, rollout_id: int, step: int) -> None:
        """The trainers have used rollout `rollout_id`; `step` optimizer steps are done."""
        ref = self.stored.pop(rollout_id, None)
        self.saves.note_trained(rollout_id)
        if ref is not None:
            self.ledger.note_all("trained", ref.group_indices, rollout_id=rollout_id, step=step)

    async def save(self, rollout_id: int, directory: str, ahead: int | None = None, wait: bool = True) -> None:
        """Write this side's part of a checkpoint: the data cursor as of the end of rollout `rollout_id`, whatever has been taken
        since, and what was generated since.

        Args:
            ahead: a later rollout that was asked for. A rollout function whose run goes on to the same bits waits for it.
            wait: False leaves out what such a function has ahead: it is started again.
        """
        state, groups = await self._call(self.saves.take(rollout_id, ahead)) if wait else self.saves.take_now(rollout_id)
        await asyncio.to_thread(self.ledger.sync)
        await asyncio.to_thread(write, Path(directory), state, groups, lambda: reached(self.args, "executor_columns", rollout_id))
        reached(self.args, "executor_saved", rollout_id)

    async def load(self, rollout_id: int, directory: str) -> None:
        """Go on after rollout `rollout_id`, from its checkpoint folder. ValueError: no usable state there, or of another rollout."""
        self.saves.load(rollout_id, Path(directory), self.data.draw)

    async def stats(self) -> dict[str, Any]:
        """What is in flight and what is waited for, for reports of stalls."""
        function: Any = self.rollout_fn
        return {
            "weight_version": self.weight_version,
            "rollouts_untrained": sorted(self.stored),
            "calls": len(self.calls),
            "waves": {name: table.stats() for name, table in self.context.tables.items()},
            **(function.stats() if hasattr(function, "stats") else {}),
        }

    def waits_for(self) -> list[str]:
        """Beside engines: rewards, and tools or environments. May be called from any thread."""
        notes = self.context.scorer.waits_for() + self.evaluator.scorer.waits_for()
        waves = [table.stats() for table in list(self.context.tables.values())]
        playing = sum(wave["samples_in_environments"] - wave["requests_in_engines"] for wave in waves)
        return notes + ([f"{playing} samples between their turns (tools, environments, --generate-function)"] if playing > 0 else [])

    async def dispose(self) -> None:
        """Cut off and await everything, give back what is stored. Idempotent, also after a failure."""
        if self.disposed:
            return
        self.disposed = True
        for task in list(self.calls):
            task.cancel()
        await asyncio.gather(*self.calls, return_exceptions=True)
        if self.rollout_fn is not None:
            await self.rollout_fn.dispose()
        if self.router is not None and self.router.in_flight():
            await self._abort_requests(self.router)
        await self.context.scorer.dispose()
        await self.evaluator.scorer.dispose()
        if self.teacher is not None:
            await self.teacher.dispose()
        self.ledger.note_all("abandoned", self.ledger.books.open)
        self.store.free([share for ref in self.stored.values() for share in ref.shares])
        self.stored.clear()
        self.ledger.close()

    async def _abort_requests(self, router: Router) -> None:
        """Whatever a plug left in the engines. An engine that does not answer is not waited for: it is ended next."""
        try:
            await asyncio.wait_for(router.abort(), self.args.shutdown_timeout / 2)
        except TimeoutError:
            logger.warning("engines did not confirm the abort of %d requests", len(router.in_flight()))

    async def _call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a call so that dispose can end it, whoever awaits it."""
        if self.disposed:
            work.close()
            raise RuntimeError("the rollout side is disposed")
        task = asyncio.ensure_future(work)
        self.calls.add(task)
        task.add_done_callback(self.calls.discard)
        try:
            return await task
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            assert caller is not None
            if self.disposed and not caller.cancelling():
                raise RuntimeError("the rollout side was disposed during this call") from None
            raise


def too_few(args: RunConfig, rows: int) -> ValueError:
    paths = " ".join(args.prompt_data.values())
    return ValueError(f"--prompt-data {paths} has {rows} prompts, fewer than --rollout-batch-size {args.rollout_batch_size}")
