"""Shared parts of the programs in benchmarks/.

Rounds by turns and goals (rounds), result files (results_file), studies over seeds (studies), a
learner's batch, cheap and slow rewards.
"""

import sys
from pathlib import Path

# first: benchmarks/learner.py and buffer.py must not hide the packages of their names, and no other
# path has actors
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
