"""What an answer is worth: functions of the completion and of the row of my.jsonl."""


def score(completion, row):
    """1 for the right answer, else 0."""
    return float(completion.strip() == row["answer"])


def is_number(completion):
    """1 for anything that is a whole number."""
    return float(completion.strip().isdigit())
