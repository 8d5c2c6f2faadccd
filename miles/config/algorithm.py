"""[algorithm]: advantages, loss and corrections."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class AlgorithmSection(Section):
    advantage_estimator: Literal["grpo", "rloo", "maxrl", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo", "opd", "sft"] = (
        "grpo"
    )
    """grpo, rloo, maxrl, reinforce_plus_plus_baseline: against the group; reinforce_plus_plus: the batch; ppo: a critic; opd: a teacher."""
    grpo_std_normalization: bool = True
    """Divide by the group's standard deviation; off is Dr.GRPO's form."""
    policy_loss: Literal["clipped", "gspo", "cispo", "sapo"] = "clipped"
    """clipped: PPO's. gspo: clipped by the sample's ratio. cispo: clipped weights, all gradients. sapo: a soft gate."""
    eps_clip: float = Field(0.2, gt=0)
    """Policy ratio is clipped below 1 - eps_clip."""
    eps_clip_high: float | None = Field(None, gt=0)
    """Policy ratio is clipped above 1 + eps_clip_high; default: eps_clip."""
    dual_clip: float | None = Field(None, gt=0)
    """clipped, gspo: with a negative advantage the ratio counts as this at most."""
    sapo_tau_pos: float = Field(1.0, gt=0)
    """sapo: how fast the gate closes where advantages are positive."""
    sapo_tau_neg: float = Field(1.05, gt=0)
    """sapo: the same where they are negative."""
    loss_aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """Mean over all trained tokens of a step, mean over samples of token means, or sum / (samples x max_response_length)."""
    kl_loss_coef: float = Field(0.0, ge=0)
    """Weight of the KL to the reference model in the loss."""
    kl_coef: float = Field(0.0, ge=0)
    """Weight of the per-token KL to the reference model taken off the reward (ppo, rloo, reinforce_plus_plus and its baseline form)."""
    kl_estimator: Literal["k1", "k2", "k3", "k3_bounded"] = "k3"
    """Estimator of the KL in the loss."""
    kl_reward_estimator: Literal["k1", "k2", "k3", "k3_bounded"] = "k1"
    """Estimator of the KL in the reward."""
    teacher_coef: float = Field(1.0, gt=0)
    """Weight of (teacher's log-prob - the rollout policy's) in each token's advantage, alone (opd) or beside the estimator's own."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    use_rollout_logprobs: bool = False
    """Take the engines' log-probs as the base of the policy ratio instead of recomputing them with the trainer."""
    use_tis: bool = False
    """Truncated importance sampling between trainer and rollout policy."""
    tis_level: Literal["token", "sequence", "geometric"] = "token"
    """The weight: each token's ratio, the product over its sample, or the geometric mean over its sample."""
    tis_clip: float = Field(2.0, gt=0)
    """Upper limit of that weight."""
    mask_level: Literal["token", "sequence", "geometric"] | None = None
    """Reject tokens, or whole samples by product or geometric mean, whose trainer / rollout ratio is outside mask_low .. mask_high."""
    mask_low: float | None = Field(None, ge=0)
    """Lowest ratio that mask_level keeps; default: no limit."""
    mask_high: float | None = Field(None, gt=0)
    """Highest ratio that mask_level keeps; default: no limit."""
    mask_outlier: float | None = Field(None, gt=0)
    """Reject samples that have any token whose ratio is above this or below 1 / this."""
    staleness_decay: float = Field(1.0, gt=0, le=1)
    """A token's policy loss is multiplied by this once for every publish between its weights and the newest; 1 is off."""
    score_centering: int = Field(0, ge=0)
    """Centre each token's score under its sampler, of which the engines tell so many likeliest tokens at each place; 0 is off."""
    keep_old_actor: bool = False
    """Keep the weights of the last publish in the trainer and recompute the ratio's base with them."""
    gamma: float = Field(1.0, ge=0, le=1)
    """Discount of GAE and of REINFORCE++'s returns."""
    gae_lambda: float = Field(1.0, ge=0, le=1)
    """Lambda of GAE."""
    value_clip: float = Field(0.2, gt=0)
    """Critic: new values may move so far from the old ones."""
    num_critic_only_steps: int = Field(0, ge=0)
    """Rollouts at the start that train only the critic."""
    normalize_advantages: bool = False
    """ppo: bring the advantages of an optimizer step's tokens to mean 0 and standard deviation 1 (reinforce_plus_plus always does)."""

    @property
    def use_critic(self) -> bool:
        """A critic is trained exactly when the estimator needs one."""
        return self.advantage_estimator == "ppo"

    @property
    def compares_siblings(self) -> bool:
        """Whether a group of one has nothing to learn from."""
        return self.advantage_estimator in ("grpo", "rloo", "maxrl", "reinforce_plus_plus_baseline")
