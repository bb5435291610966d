"""Discrete-event simulation of a run: the real store, admission, evaluations and generator's
schedule; times instead of a model.
"""
