"""[data]: where prompts come from."""

from typing import Any

from pydantic import Field

from miles.config.section import Section


class DataSection(Section):
    prompt_data: str = ""
    """Training prompts: a .jsonl, .json or .parquet file, or a directory written by datasets.save_to_disk."""
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
    """Prompts with more tokens than this, templated, are left out and counted."""
    skip_bad_rows: bool = False
    """Leave out rows that cannot be read, and say how many, instead of ending with the file and line of the first."""
    shuffle: bool = True
    """A new order each epoch, from the seed and the epoch."""
    num_epoch: int | None = Field(None, ge=1)
    """Passes over the data; gives num_rollout when that is not set, and ends the data when both are."""
