"""[algorithm]: advantages, loss and corrections."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class AlgorithmSection(Section):
    advantage_estimator: Literal["grpo", "ppo", "sft"] = "grpo"
    """grpo: reward against the group's mean. ppo: a critic's values and GAE. sft: supervised, set by `miles sft`."""
    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation; off is Dr.GRPO's form."""
    eps_clip: float = Field(0.2, gt=0)
    """Policy ratio is clipped below 1 - eps_clip."""
    eps_clip_high: float | None = Field(None, gt=0)
    """Policy ratio is clipped above 1 + eps_clip_high; default: eps_clip."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over all trained tokens of a step, mean over samples of token means, or sum / (samples x max_response_length)."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model in the loss."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the per-token KL to the reference model taken off the reward (ppo)."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Estimator of the KL in the loss."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    use_rollout_logprobs: bool = False
    """Take the engines' log-probs as the base of the policy ratio instead of recomputing them with the trainer."""
    use_tis: bool = False
    """Truncated importance sampling between trainer and rollout policy, per token."""
    tis_clip: float = Field(2.0, gt=0)
    """Upper limit of that weight."""
    keep_old_actor: bool = False
    """Keep the weights of the last publish in the trainer and recompute the ratio's base with them."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of GAE."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE."""
    value_clip: float = Field(0.2, gt=0)
    """Critic: new values may move so far from the old ones."""
    num_critic_only_steps: int = Field(0, ge=0)
    """Rollouts at the start that train only the critic."""
    normalize_advantages: bool = False
    """ppo: bring the advantages of an optimizer step's tokens to mean 0 and standard deviation 1."""

    @property
    def use_critic(self) -> bool:
        """A critic is trained exactly when the estimator needs one."""
        return self.advantage_estimator == "ppo"
