"""Discrete-event simulation of a run.

Store, admission, evaluations and the generator's schedule are the real ones; times replace the
model.
"""
