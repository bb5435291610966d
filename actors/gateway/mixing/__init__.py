"""The sessions of a mixture's parts, each with its own source."""
