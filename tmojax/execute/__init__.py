"""Schedules that run: a traced step on real arrays, as a plan says (docs/run-a-plan.md)."""
