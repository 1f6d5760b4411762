"""The built-in algorithms, one per file. Each header gives the formula, the paper, and where the code deviates from it."""
