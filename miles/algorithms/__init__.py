"""Advantages, losses and corrections: pure functions of tensors."""
