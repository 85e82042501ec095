"""Planner of tensor movement in multi-GPU training."""
