"""[reward]: how samples are scored."""

import math
from typing import Literal

from pydantic import Field

from miles.config.section import Section


class RewardSection(Section):
    reward: str = "math"
    """math, gsm8k, dapo, multiple_choice, exact, last_number, f1, ifeval, code, think_format, judge, remote, reasoning_gym, a dotted
    path to your own sync or async function, or a mix: math=0.8,think_format=0.2."""
    reward_by_set: dict[str, str] = Field(default_factory=dict)
    """Rewards of single sets of prompt_data or eval_data, {name: reward}; the others get reward."""
    reward_timeout: float = Field(30.0, gt=0)
    """Seconds that scoring one sample may take."""
    reward_workers: int = Field(1, ge=0)
    """Processes that score with sync functions; 0 scores in the executor's: what passes its limit is left behind, memory is unlimited."""
    reward_memory_gb: float = Field(8.0, gt=0)
    """GiB of memory that one of these processes may take; past it the function gets MemoryError."""
    reward_failure: Literal["fail", "drop_group", "exclude"] = "fail"
    """A reward that raises or hangs: end the run with its traceback, start the group again, or leave the sample out of training.
    Under fail, too, an answer that drives a built-in verifier past its limits is left out."""
    reward_url: str | None = None
    """Where reward remote POSTs {prompt, response, label, metadata}."""
    code_timeout: float = Field(5.0, gt=0)
    """Seconds of CPU that one run of a program may take under reward code; three times as many by the clock."""
    code_memory_mb: int = Field(512, ge=64)
    """MiB of address space of each process of such a program."""
    judge_url: str | None = None
    """OpenAI-compatible server of reward judge, such as http://localhost:8000/v1."""
    judge_model: str | None = None
    """Name that the judge's server knows its model by."""
    judge_key: str | None = None
    """Where the judge's API key is: file:PATH or env:NAME."""
    judge_prompt: str | None = None
    """File with what the judge is asked; {prompt}, {response} and {label} are filled in. Default: a general one, with scores to 10."""
    judge_pattern: str | None = None
    """Regular expression whose one group is the score in the judge's answer, the last match counts; default: Score: 7 or "score": 7."""
    judge_max_score: float = Field(10.0, gt=0)
    """Score that is worth a reward of 1."""
    judge_concurrency: int = Field(16, ge=1)
    """Questions to the judge at once."""


def parts_of(reward: str) -> dict[str, float]:
    """Reward -> weight. "math" is {"math": 1.0}.

    Raises:
        ValueError: says what is wrong with the mix.
    """
    if "=" not in reward:
        return {reward: 1.0}
    parts: dict[str, float] = {}
    for entry in reward.split(","):
        name, equals, weight = (text.strip() for text in entry.partition("="))
        try:
            value = float(weight)
        except ValueError:
            value = math.nan
        if not name or not equals or not math.isfinite(value):
            raise ValueError(f"{entry.strip()!r} in {reward!r} is not NAME=WEIGHT")
        if name in parts:
            raise ValueError(f"{name} stands twice in {reward!r}")
        parts[name] = value
    return parts
