"""What `benchmarks/chaos.py` is made of: the board that its processes share, their hooks, their
forks, the faults, and the checker that uses no code of the product.
"""
