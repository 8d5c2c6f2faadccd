"""When periodic things are due."""


def should_run_periodic_action(rollout_id: int, interval: int | None, num_rollout_per_epoch: int | None, num_rollout: int | None) -> bool:
    """After the last rollout, after every `interval` ones, and at the end of an epoch; never without an interval."""
    if interval is None:
        return False
    done = rollout_id + 1
    return done == num_rollout or done % interval == 0 or (num_rollout_per_epoch is not None and done % num_rollout_per_epoch == 0)
