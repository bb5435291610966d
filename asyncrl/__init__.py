"""asyncrl: reinforcement learning of language models, generators and learner as separate processes."""
