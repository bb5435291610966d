"""Processes of benchmarks/gateway.py: stand-ins around the gateway, clients, and its rivals."""
