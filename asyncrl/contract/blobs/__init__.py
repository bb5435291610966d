"""Large immutable parts of messages, named by their digests."""
