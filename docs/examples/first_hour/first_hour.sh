#!/usr/bin/env bash
# The first hour as a stranger types it, in a new folder outside the clone: from `pip install` of the wheel to the exported model.
#     docs/examples/first_hour/first_hour.sh dist/posttrain-0.1.0-py3-none-any.whl > docs/examples/first_hour/transcript.txt
# Prints what a terminal would show, pip's progress left out. Leaves the folder for a look, and says where it is.
set -eu
wheel=$(realpath "$1") here=$(dirname "$(realpath "${BASH_SOURCE[0]}")")
folder=$(mktemp -d)/first-hour
mkdir "$folder" && cd "$folder"
export COLUMNS=120 PIP_QUIET=2 PIP_DISABLE_PIP_VERSION_CHECK=1

type_() { # prints a line as typed, then runs it
  echo "\$ $*"
  eval "$*"
}

first_hour() {
  type_ "ls"
  type_ "python3 -m venv venv && source venv/bin/activate"
  type_ "pip install $(basename "$wheel")"
  type_ "head -2 my.jsonl"
  type_ "cat my_rewards.py"
  environments='environments=[{name: function, options: {reward: my_rewards.py:score, data: my.jsonl, prompt_column: question, answer_column: answer}}]'
  type_ "posttrain train experiment=arithmetic_grpo rl.steps=40 name=mine '$environments'"
  run=$(ls -d outputs/mine-*)
  type_ "posttrain show $run | head -12"
  type_ "posttrain train --resume $run rl.steps=50"
  type_ "cat train.py"
  type_ "python train.py"
  other=$(ls -d outputs/arithmetic-grpo-*)
  type_ "posttrain diff $run $other"
  type_ "posttrain export $run my-model"
  type_ "ls my-model"
  type_ "cat ask.py"
  type_ "python ask.py"
}

cp "$wheel" "$here"/{my.jsonl,my_rewards.py,train.py} .
cat >ask.py <<'PY'
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("my-model"), AutoTokenizer.from_pretrained("my-model")
for question in ("3+4=", "17+5=", "9+9="):
    ids = tokenizer(question, return_tensors="pt", return_token_type_ids=False)
    answer = model.generate(**ids, max_new_tokens=4, do_sample=False)[0, ids.input_ids.shape[1] :]
    print(question, tokenizer.decode(answer, skip_special_tokens=True))
PY
echo "# folder: $folder" >&2
first_hour 2>&1 | sed -u 's/.*\r//' # of a bar, its end
exit "${PIPESTATUS[0]}"
