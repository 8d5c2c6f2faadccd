"""When a sequence is done."""

from __future__ import annotations

from typing import Any

from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from miles.engines.embedded.sequence import Sequence
from miles.types import FinishReason


class Stopping:
    """Knows the model's end tokens and, for stop strings, its tokenizer. The tokens that end a response stay in it."""

    def __init__(self, eos_ids: frozenset[int], tokenizer: PreTrainedTokenizerBase | None) -> None:
        self.eos_ids = eos_ids
        self.tokenizer = tokenizer

    @classmethod
    def of(cls, model: PreTrainedModel, checkpoint: str, *, trust_remote_code: bool = False) -> Stopping:
        """Collect the end tokens of generation config, model config and tokenizer. A model may come without a tokenizer."""
        try:
            tokenizer = AutoTokenizer.from_pretrained(checkpoint, trust_remote_code=trust_remote_code)
        except (OSError, ValueError):
            tokenizer = None
        sources = (model.generation_config, model.config, tokenizer)
        ids = [token for source in sources if source is not None for token in _as_list(source.eos_token_id)]
        return cls(frozenset(ids), tokenizer)

    def check(self, sequence: Sequence) -> None:
        """Set `finish` when the newest token ends the sequence. An end by a stop wins over one by length."""
        sampling = sequence.request.sampling
        if sequence.tokens[-1] in sequence.stop_ids or (sampling.stop and self._ends_with(sequence, sampling.stop)):
            sequence.finish = FinishReason.STOP
        elif len(sequence.tokens) >= sequence.max_tokens:
            sequence.finish = FinishReason.LENGTH

    def _ends_with(self, sequence: Sequence, stops: tuple[str, ...]) -> bool:
        """Whether a stop string has appeared among the newest tokens.

        Each token but special ones writes at least a byte, so a string's length in bytes bounds how far back it began; the few
        tokens more keep it away from the edge, where some tokenizers strip a space.
        """
        reach = max(len(stop.encode()) for stop in stops) + 4
        return self.contains(sequence.tokens[max(sequence.prompt_length, len(sequence.tokens) - reach) :], stops)

    def contains(self, tokens: list[int], stops: tuple[str, ...]) -> bool:
        """Whether the text of these tokens has a stop string in it."""
        assert self.tokenizer is not None
        text = self.tokenizer.decode(tokens)
        return any(stop in text for stop in stops)


def _as_list(value: Any) -> list[int]:
    if value is None:
        return []
    return [value] if isinstance(value, int) else list(value)
