"""Paired comparisons of arms: same weights, prompts, seeds and tickets.

The verdict names the differences that are noise.
"""
