"""Paired comparisons of arms: same weights, prompts, seeds and tickets.

The verdict says which differences are noise.
"""
