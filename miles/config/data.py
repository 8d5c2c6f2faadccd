"""[data]: where prompts come from."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from miles.config.section import Section


def set_name(path: str) -> str:
    """What a data set without a name of its own is called: a/sums.jsonl is sums."""
    return Path(path).name.removesuffix(Path(path).suffix) or path


def _named(value: Any) -> Any:
    if isinstance(value, str):
        return {set_name(value): value} if value else {}
    return dict(value) if isinstance(value, Mapping) else value


class DataSection(Section):
    prompt_data: Annotated[dict[str, str], BeforeValidator(_named)] = Field(default_factory=dict)
    """Training prompts: a .jsonl, .json or .parquet file or a directory written by datasets.save_to_disk; or several, NAME=PATH."""
    prompt_weights: dict[str, float] = Field(default_factory=dict)
    """Share of the draws that each set of prompt_data gets, {name: weight}; default: each row of all sets once an epoch."""
    curriculum: str | None = None
    """Easiest first: a numeric field of the row or its metadata (low is easy), or pass_rate, the row's last mean reward (high is easy)."""
    lazy_data: bool = False
    """Keep only each row's place in memory and read it when it is drawn: .jsonl, .parquet and saved datasets larger than memory."""
    prompt_key: str = "prompt"
    """Field with the prompt: a string, or a list of chat messages."""
    label_key: str = "label"
    """Field with the label that the reward compares with; rows without it get None."""
    metadata_key: str = "metadata"
    """Field with a table that is handed to rewards and environments as it is."""
    tools_key: str = "tools"
    """Field with the tool schemas that the chat template renders."""
    apply_chat_template: bool = True
    """Render prompts with the model's chat template; a string counts as one user message. Off: strings are sent as they are."""
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Extra arguments of the chat template, such as enable_thinking."""
    max_prompt_length: int | None = Field(None, ge=1)
    """Prompts with more tokens than this, templated, are left out; rollout/prompts_left_out counts them and bad rows."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be read, and say how many, instead of ending with the file and line of the first."""
    shuffle: bool = True
    """A new order each epoch, from the seed and the epoch."""
    num_epoch: int | None = Field(None, ge=1)
    """Passes over the data; gives num_rollout when that is not set, and ends the data when both are."""
