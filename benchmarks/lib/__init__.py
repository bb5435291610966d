"""Shared parts of the programs in benchmarks/.

Rounds by turns and goals (rounds), result files (results_file), studies over seeds (studies), a
learner's batch, cheap and slow rewards.
"""
