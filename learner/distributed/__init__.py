"""Backends of several learner ranks: whole models in each, DeepSpeed and FSDP2."""
