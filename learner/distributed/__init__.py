"""Backends of several learner ranks: DeepSpeed and FSDP2."""
