"""The training and the sampling process of `asyncrl tinker`."""
