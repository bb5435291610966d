"""What the programs in benchmarks/ share: rounds by turns and goals (rounds), result files
(results_file), studies over seeds (studies), a learner's batch, rewards that are cheap or slow.
"""
