"""Scoring: the scorer, the pool that runs sync functions, and one file per verifier."""
