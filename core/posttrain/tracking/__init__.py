"""What a run records and shows: directory, metrics, events, rollouts, logs, display, summary. Nothing here needs torch."""
