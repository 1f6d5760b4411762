"""The command line. Help and lists load neither torch nor Hydra; commands import what they need when they run."""
