"""Rows, prompts and rewards: environments, DataPackers, datasets and the sampler. Importing any of it loads no torch."""
