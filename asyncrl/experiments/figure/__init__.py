"""Figures of the measurements of runs, comparisons and sweeps."""
