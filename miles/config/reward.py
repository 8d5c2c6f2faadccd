"""[reward]: how samples are scored."""

from typing import Literal

from pydantic import Field

from miles.config.section import Section


class RewardSection(Section):
    reward: str = "math"
    """math, multiple_choice, exact, last_number, f1, remote, reasoning_gym, or a dotted path to your own sync or async function."""
    reward_timeout: float = Field(30.0, gt=0)
    """Seconds that scoring one sample may take."""
    reward_workers: int = Field(1, ge=0)
    """Processes that score with sync functions; 0 scores in the executor's: what passes its limit is left behind, memory is unlimited."""
    reward_memory_gb: float = Field(8.0, gt=0)
    """GiB of memory that one of these processes may take; past it the function gets MemoryError."""
    reward_failure: Literal["fail", "drop_group", "exclude"] = "fail"
    """A reward that raises or hangs: end the run with its traceback, start the group again, or leave the sample out of training."""
    reward_url: str | None = None
    """Where reward remote POSTs {prompt, response, label, metadata}."""
