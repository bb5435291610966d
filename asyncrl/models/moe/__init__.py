"""Mixtures of experts: their layers in the packed forward, and the routing that is replayed."""
