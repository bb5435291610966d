"""Several tasks in one run: their order, prompts and rewards."""
