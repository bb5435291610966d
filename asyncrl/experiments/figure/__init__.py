"""Figures of what runs, comparisons and sweeps measured."""
