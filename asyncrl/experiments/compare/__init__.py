"""Arms against each other, fairly: same weights, prompts, seeds and tickets; a verdict that says
what is noise.
"""
