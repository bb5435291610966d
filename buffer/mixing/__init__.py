"""The state of a mixture of tasks: what was drawn, removed and trained of each."""
