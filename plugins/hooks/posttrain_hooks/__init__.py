"""Built-in hooks: the trackers TensorBoard, Weights & Biases and Trackio. Each is imported, and needed, only when selected."""
