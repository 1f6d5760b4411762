"""posttrain: reinforcement learning after pre-training."""
