"""Rules for [algorithm]: combinations that make no sense, and the corrections that an asynchronous run needs."""

import logging
from collections.abc import Iterator

from miles.config.problem import Problem, wrong
from miles.config.run_config import RunConfig

logger = logging.getLogger(__name__)

KL_IN_REWARD = ("ppo", "rloo", "reinforce_plus_plus", "reinforce_plus_plus_baseline")
CORRECTIONS = ("use_rollout_logprobs", "use_tis", "keep_old_actor", "score_centering")


def algorithm(args: RunConfig) -> Iterator[Problem]:
    if args.keep_old_actor and args.use_rollout_logprobs:
        yield wrong(args, "keep_old_actor use_rollout_logprobs", "each sets the base of the policy ratio; choose one")
    if args.kl_coef > 0 and args.advantage_estimator not in KL_IN_REWARD:
        text = f"a KL in the reward is for {', '.join(KL_IN_REWARD)}; a KL in the loss is --kl-loss-coef"
        yield wrong(args, "kl_coef advantage_estimator", text)
    if args.num_critic_only_steps > 0 and not args.use_critic:
        yield wrong(args, "num_critic_only_steps advantage_estimator", "there is no critic; ppo has one")
    yield from _teacher(args)
    yield from _masks(args)
    if args.score_centering:
        yield from _centering(args)


def _teacher(args: RunConfig) -> Iterator[Problem]:
    if args.advantage_estimator == "opd" and not args.has_teacher:
        yield wrong(args, "advantage_estimator", "needs a --teacher-checkpoint, or --teacher-urls of servers that hold one")
    if args.has_teacher and args.advantage_estimator in ("ppo", "sft"):
        name = "teacher_checkpoint" if args.teacher_checkpoint is not None else "teacher_urls"
        yield wrong(args, f"{name} advantage_estimator", "a critic's values know nothing of a teacher")
    if not args.teacher_urls:
        return
    if args.teacher_checkpoint is not None:
        yield wrong(args, "teacher_urls teacher_checkpoint", "one teacher at a time")
    if args.temperature != 1:
        yield wrong(args, "teacher_urls temperature", "servers score given tokens at temperature 1; --teacher-checkpoint does at any")
    if args.deterministic:
        yield wrong(args, "teacher_urls deterministic", "a server's last bits depend on what else it computes; use --teacher-checkpoint")
    for url in args.teacher_urls:
        if not url.startswith(("http://", "https://")):
            yield wrong(args, "teacher_urls", f"{url!r} is no address; it looks like http://localhost:30000")


def _centering(args: RunConfig) -> Iterator[Problem]:
    """What it takes off is what the sampler expects of a token, so all that weighs the token must follow from it alone."""
    if args.advantage_estimator == "sft":
        yield wrong(args, "score_centering advantage_estimator", "nothing was sampled")
    if args.policy_loss not in ("clipped", "cispo"):
        yield wrong(args, "score_centering policy_loss", "is for clipped and cispo, whose gradient is a token's own score")
    if args.use_rollout_logprobs:
        yield wrong(args, "score_centering use_rollout_logprobs", "the policy ratio then corrects for the sampler; choose one")
    levels = [name for name in ("tis_level", "mask_level") if args.__dict__[name] not in (None, "token")]
    for name in levels if args.use_tis else [name for name in levels if name != "tis_level"]:
        yield wrong(args, f"score_centering {name}", "composes with weights and masks of single tokens")
    if args.mask_outlier is not None:
        yield wrong(args, "score_centering mask_outlier", "composes with weights and masks of single tokens")


def _masks(args: RunConfig) -> Iterator[Problem]:
    limits = [name for name in ("mask_low", "mask_high") if args.__dict__[name] is not None]
    if args.mask_level is not None and not limits:
        yield wrong(args, "mask_level", "needs --mask-low, --mask-high or both")
    if args.mask_level is None and limits:
        yield wrong(args, " ".join(limits), "limits of --mask-level, which is not set")
    if args.mask_low is not None and args.mask_high is not None and args.mask_low >= args.mask_high:
        yield wrong(args, "mask_low mask_high", "nothing lies between them")
    if args.mask_outlier is not None and args.mask_outlier <= 1:
        yield wrong(args, "mask_outlier", "must be above 1: a ratio of 1 is no outlier")
    if args.dual_clip is not None:
        high = args.eps_clip if args.eps_clip_high is None else args.eps_clip_high
        if args.policy_loss not in ("clipped", "gspo"):
            yield wrong(args, "dual_clip policy_loss", "is for clipped and gspo")
        elif args.dual_clip <= 1 + high:
            yield wrong(args, "dual_clip", f"must be above the upper clip, {1 + high:g}")


def validate_async_off_policy_correction(args: RunConfig) -> None:
    """Refuse an asynchronous run that treats stale samples as its own; called by the asynchronous driver.

    Batch r + 1 is requested before the actor has trained on batch r. A ratio recomputed with the current actor starts at one
    and clips around a policy that never wrote the data, whatever the estimator. So a correction must be chosen.
    Warns when the one that is on reaches less far back than the data may.

    Raises:
        ValueError: names the three corrections.
    """
    if args.advantage_estimator == "sft":
        return
    lag = max_weight_lag(args)
    if not any(args.__dict__[name] for name in CORRECTIONS):
        raise ValueError(
            f"--advantage-estimator {args.advantage_estimator}: asynchronous samples lag up to {lag} rollout(s) behind the weights they"
            " train, and nothing corrects for it. Turn on one of --use-rollout-logprobs (the engines' log-probs are the base of the policy"
            " ratio), --use-tis (truncated importance sampling), --keep-old-actor (the ratio's base is the last publish), --score-centering"
        )
    if args.keep_old_actor and not args.use_tis and lag > 1:
        logger.warning(
            "--keep-old-actor corrects for samples of the last publish, but with %s they may be %d rollouts old; --use-tis or"
            " --use-rollout-logprobs corrects for any lag",
            f"--max-weight-staleness {args.max_weight_staleness}"
            if args.fully_async
            else f"--update-weights-interval {args.update_weights_interval}",
            lag,
        )


def max_weight_lag(args: RunConfig) -> int:
    """The most rollouts that a trained sample can lag behind: k in plain async with a publish every k rollouts."""
    k = args.update_weights_interval
    return k if not args.fully_async else max(1, args.max_weight_staleness) * k + k - 1
