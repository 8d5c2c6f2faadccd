"""What a user's exception says of itself."""

from __future__ import annotations


def text_of(error: BaseException) -> str:
    """Its type and text, whatever it does when it is asked for the text."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:
        return f"{type(error).__name__}, whose text cannot be had"
