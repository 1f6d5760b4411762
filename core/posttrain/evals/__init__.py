"""Evals: any environment asked under recorded settings, at recorded weights, with what the numbers can and cannot say."""
