"""Parts of `benchmarks/chaos.py`.

The board that its processes share, their hooks and forks, the faults, and the checker, which uses
no code of the product."""
