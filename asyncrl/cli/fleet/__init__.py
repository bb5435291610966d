"""Commands for runs on several machines: join and scale."""
