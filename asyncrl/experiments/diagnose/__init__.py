"""Diagnosis of runs of other frameworks: their logs, exact token data and the keys to change."""
