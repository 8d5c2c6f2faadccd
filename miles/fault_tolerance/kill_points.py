"""Named points at which `--debug-kill` ends a process, as a machine that goes away does: for tests of resuming."""

import os
import signal

from miles.config.run import RunSection

POINTS = {
    "taken": "executor: a group of the rollout was drawn and noted",
    "generated": "executor: a sample of the group (a group's number here, not a rollout's) has its answer",
    "scored": "executor: a sample of the group has its reward",
    "drained": "executor: the rollout is handed out",
    "before_step": "trainer: before an optimizer step of the rollout",
    "after_step": "trainer: after one",
    "before_trained": "driver: the rollout is trained, and the ledger does not know",
    "after_trained": "driver: the ledger knows",
    "before_save": "driver: before anything of the rollout's checkpoint is written",
    "actor_saved": "driver: the actor's part was handed on",
    "critic_saved": "driver: the critic's part was handed on",
    "executor_columns": "executor: between the two files of its part",
    "executor_saved": "executor: its part is written, and the driver does not know",
    "before_complete": "driver: every part is on disk",
    "after_complete": "driver: the checkpoint is complete, and `latest` points to the one before",
    "before_publish": "driver: the engines are paused",
    "bucket_sent": "trainer: a bucket of the publish of that weight version is sent",
    "after_publish": "driver: the engines have the weights, and the executor does not know",
    "before_eval": "driver: before the evaluation after the rollout",
}


def reached(args: RunSection, point: str, number: int) -> None:
    """Ends this process with SIGKILL if `--debug-kill` names this point of this rollout."""
    assert point in POINTS, point
    if args.debug_kill is not None and args.debug_kill == f"{point}@{number}":
        os.kill(os.getpid(), signal.SIGKILL)
