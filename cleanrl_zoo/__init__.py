"""Reinforcement learning, one readable file per algorithm, on one small library of tested maths."""

__version__ = "0.1.0"
