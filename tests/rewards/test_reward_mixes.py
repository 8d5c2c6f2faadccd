"""Several rewards in one run: weighted sums, and rewards of single data sets."""

import logging

import pytest

from miles.config.cli import resolve
from miles.config.reward import parts_of
from miles.config.validate import SettingsError
from miles.rewards.call import BUILTIN
from miles.rewards.reward import GroupRewardError, RewardError


async def test_a_mix_is_the_weighted_sum_and_shows_its_parts(scorer, answer):
    each = scorer("math=0.8, think_format=0.2,reward_functions.label_in_response_async=-1", reward_workers=1)
    for response, wanted, parts in [
        (r"<think>a</think>\boxed{4}", 0.0, (1.0, 1.0, 1.0)),
        (r"\boxed{5}", 0.0, (0.0, 0.0, 0.0)),
        (r"<think>a</think>\boxed{5}", 0.2, (0.0, 1.0, 0.0)),
        (r"four: \boxed{2+2}", 0.8, (1.0, 0.0, 0.0)),
    ]:
        sample = answer(response)
        await each.score(sample)
        assert sample.reward == pytest.approx(wanted)
        names = ("math", "think_format", "reward_functions.label_in_response_async")
        assert tuple(sample.reward_details[name] for name in names) == parts
        assert sample.reward_details["think_format/marked"] == float("</think>" in response)


async def test_a_part_that_abstains_or_fails_is_not_a_zero(scorer, answer):
    sample = answer(r"\boxed{5}", "n/a")
    each = scorer("math=0.5,think_format=0.5", reward_workers=0)
    await each.score(sample)
    assert (sample.reward, each.num_unscored) == (None, 1)
    with pytest.raises(RewardError, match=r"reward 'reward_functions\.raises' failed"):
        await scorer("math=1,reward_functions.raises=0", reward_workers=0).score(answer("4"))


async def test_a_reward_for_each_set(scorer, answer):
    each = scorer("math", reward_workers=0, reward_by_set={"trivia": "exact", "style": "exact=0.5,think_format=0.5"})
    rewards = []
    for data_set in ("", "sums", "trivia", "style"):
        sample = answer(r"\boxed{4}", data_set=data_set)
        await each.score(sample)
        rewards.append(sample.reward)
    assert rewards == [1.0, 1.0, 0.0, 0.0]
    await scorer("math=-0.5", reward_workers=0).score(sample)
    assert sample.reward == -0.5, "one part alone has its weight too"


@pytest.mark.parametrize(
    ("reward", "parts"),
    [("math", {"math": 1.0}), ("a.b=1", {"a.b": 1.0}), (" a = .5 , b=-2e-1", {"a": 0.5, "b": -0.2})],
)
def test_how_a_mix_is_written(reward, parts):
    assert parts_of(reward) == parts


@pytest.mark.parametrize("reward", ["math=", "=1", "math=x", "math=nan", "math=inf", "math=1,", "math=1,exact", "math=1,math=2"])
def test_a_mix_that_cannot_be_read_is_refused_at_start(reward):
    with pytest.raises(SettingsError, match=r"--reward: .*(NAME=WEIGHT|stands twice)"):
        resolve(["--reward", reward, "--num-rollout", "1"])


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--prompt-data", "a.jsonl", "--reward-by-set", "b=math"], "no set is called b; there are a"),
        (["--prompt-data", "a.jsonl", "--reward-by-set", "a=math=x"], "--reward-by-set: 'math=x'"),
        (["--reward", "math=1,judge=1"], "needs --judge-url and --judge-model"),
        (["--judge-key", "sk-123"], "wants file:PATH or env:NAME, not the key itself"),
        (["--eval-reward", "remote"], "needs --reward-url"),
    ],
)
def test_rewards_that_cannot_work_are_refused(flags, reason):
    with pytest.raises(SettingsError, match=reason):
        resolve(flags)


@pytest.mark.parametrize("policy", ["fail", "drop_group"])
async def test_an_answer_that_a_built_in_verifier_cannot_digest_is_left_out_and_shown(scorer, answer, monkeypatch, caplog, policy):
    monkeypatch.setitem(BUILTIN, "math", "reward_functions.as_told")
    each = scorer("math", reward_timeout=0.5, reward_failure=policy)
    samples = [answer("hang"), answer("die"), answer("fine")]
    with caplog.at_level(logging.WARNING):
        for sample in samples[:2]:
            if policy == "drop_group":
                with pytest.raises(GroupRewardError):
                    await each.score(sample)
            else:
                await each.score(sample)
        await each.score(samples[2])
    assert [sample.reward for sample in samples] == [None, None, 1.0]
    assert each.num_failed == 2
    assert "took longer than --reward-timeout 0.5 s" in caplog.text
    assert "as_told" in caplog.text
