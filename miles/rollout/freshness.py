"""Which tokens of a sample are trained, by the age of the weights that wrote them."""

from __future__ import annotations

from miles.types import PromptGroup, Sample


def mask_older(sample: Sample, version: int) -> int:
    """Leave the tokens of weights older than `version` out of the loss. Returns how many that were."""
    masked = 0
    for span in sample.version_spans:
        if span.version < version:
            masked += sum(sample.loss_mask[span.start : span.end])
            sample.loss_mask[span.start : span.end] = [0] * (span.end - span.start)
            sample.rollout_logprobs[span.start : span.end] = [0.0] * (span.end - span.start)
    return masked


def oldest_trained(group: PromptGroup) -> int | None:
    """The oldest version of any token that is trained; None without one."""
    spans = ((sample, span) for sample in group.samples for span in sample.version_spans)
    return min((span.version for sample, span in spans if any(sample.loss_mask[span.start : span.end])), default=None)
