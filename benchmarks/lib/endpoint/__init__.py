"""What benchmarks/gateway.py starts: who stands around the gateway, who asks it, and its rivals."""
