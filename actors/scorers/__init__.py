"""Rewards by other models: a judge behind a URL, a classifier in a directory."""
