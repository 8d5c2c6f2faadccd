"""f1: word overlap of the response with the label, as SQuAD measures it (Rajpurkar et al. 2016, arXiv 1606.05250)."""

from __future__ import annotations

import re
import string
from collections import Counter

from miles.types import Sample

ARTICLES = re.compile(r"\b(?:a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def score(sample: Sample) -> float | None:
    """Best F1 over the label's alternatives (a list counts as several right answers); None without a label."""
    labels = sample.label if isinstance(sample.label, list) else [sample.label]
    golds = [gold for label in labels if label is not None and (gold := words(str(label)))]
    return max((f1(words(sample.response), gold) for gold in golds), default=None)


def words(text: str) -> list[str]:
    """Lower case, without punctuation and articles. A text of nothing else keeps its words."""
    bare = text.lower().translate(PUNCTUATION)
    return ARTICLES.sub(" ", bare).split() or bare.split()


def f1(answer: list[str], gold: list[str]) -> float:
    """Harmonic mean of precision and recall over words counted with multiplicity."""
    shared = sum((Counter(answer) & Counter(gold)).values())
    return 2 * shared / (len(answer) + len(gold)) if shared else 0.0
