"""Inference engines, and the router that spreads requests over them."""
