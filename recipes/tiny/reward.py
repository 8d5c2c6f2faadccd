"""A dense reward that a random model can climb: the share of digits in the answer, and a bonus for the right sum."""

from miles.types import Sample


def digits(sample: Sample) -> dict[str, float]:
    """0 to 1 for digits, plus 1 when the answer is the label."""
    text = sample.response.strip()
    share = sum(letter.isdigit() for letter in text) / len(text) if text else 0.0
    right = float(text == str(sample.label))
    return {"reward": share + right, "right": right}
