"""Solvers: learning rates, update rules, tests, snapshots; they decide what the next run does."""
