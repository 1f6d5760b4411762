#!/usr/bin/env bash
# A plug-in from `posttrain new` to its publication, and the six ways in which it can be broken, as an author types them.
#     docs/examples/write_a_plugin/write_a_plugin.sh dist/posttrain-0.1.0-py3-none-any.whl > docs/examples/write_a_plugin/transcript.txt
# The wheel goes into an environment of its own; what it needs is taken from the one that `python3` belongs to, and nothing is fetched.
# Prints what a terminal would show, in a new folder, which is left for a look.
set -eu
wheel=$(realpath "$1") site=$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
folder=$(mktemp -d)/author
mkdir "$folder" && cd "$folder"
export COLUMNS=120 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_NO_INDEX=1 PIP_NO_DEPS=1 PIP_NO_BUILD_ISOLATION=0 # for pip, 0 is: none
python3 -m venv venv && source venv/bin/activate
echo "import site; site.addsitedir('$site')" >"$(python3 -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/outer.pth"
pip install -q "$wheel"
printf '#!/bin/sh\nexec python3 -m pytest "$@"\n' >venv/bin/pytest && chmod +x venv/bin/pytest
export PYTHONPATH=$VIRTUAL_ENV/lib/python3.11/site-packages # before the paths of an editable posttrain

type_() { # prints a line as typed, then runs it; one that fails says its exit code
  echo "\$ $*"
  eval "$*" || echo "[exit code $?]"
}

break_() { # tells what is done, breaks the plug-in by a sed script, trains, and mends it
  echo
  echo "# $1"
  type_ "sed -i '$2' src/my_sums/env.py"
  type_ "$train"
  cp ../good.py src/my_sums/env.py
}

train="posttrain train experiment=arithmetic_grpo rl.steps=3 'environments=[{name: my_sums}]'"

author() {
  type_ "posttrain new env my-sums"
  type_ "cd my-sums"
  type_ "pip install -q -e '.[test]'"
  type_ "pytest -q"
  type_ "posttrain plugins list my_sums"
  type_ "posttrain plugins check my_sums largest=9 test_size=20"
  type_ "$train"
  type_ "posttrain train experiment=arithmetic_grpo 'environments=[{name: my_sums, options: {larges: 9}}]'"
  cp src/my_sums/env.py ../good.py

  echo
  echo "# Six ways to break it. 1: it is not installed, or not under that name"
  type_ "${train/name: my_sums/name: my_sum}"
  break_ "2: something that it needs is not installed" "s/^import random/&\nimport wordfreq/"
  break_ "3: its import raises" "s/^class/LIMIT = {\"largest\": 19}[\"lowest\"]\n\n\n&/"
  break_ "4: it is something else" "s/MySumsEnv(Environment)/MySumsEnv/"
  break_ "5: it was written for another posttrain" "s/api = 1/api = 2/"
  break_ "6: its options are no dataclass" "s/seed: int = 0 /words: list[str] = [] /"

  echo
  echo "# Broken and not selected, it stops nobody"
  type_ "sed -i 's/^import random/&\nimport wordfreq/' src/my_sums/env.py"
  type_ "posttrain train experiment=arithmetic_grpo rl.steps=1"
  type_ "posttrain plugins list my_sums"
  type_ "posttrain plugins doctor my_sums"
  cp ../good.py src/my_sums/env.py

  echo
  echo "# Mended, built, and taken away"
  type_ "pip wheel -q -w dist . && ls dist"
  type_ "pip uninstall -q -y my-sums"
  type_ "$train"
}

echo "# folder: $folder" >&2
author 2>&1 | sed -u -e 's/.*\r//' -e "s|$folder/||g" # of a bar, its end
