import posttrain

def score(completion, row):
    return float(completion.strip() == row["answer"])

result = posttrain.train(experiment="arithmetic_grpo", data="my.jsonl", reward=score,
                         prompt_column="question", answer_column="answer", rl={"steps": 40})
print([round(row["reward/mean"], 2) for row in result.metrics()[::8]])
