"""Commands of runs on several machines: who joins, how many there are."""
