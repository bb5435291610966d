"""Several tasks in one run: which one comes next, and their prompts and rewards."""
