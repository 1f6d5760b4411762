#!/usr/bin/env bash
# Usage: requirements/install.sh VENV PYTHON. Creates the environment VENV that requirements/cpu.txt describes, with posttrain
# in it as an editable install. Quick when nothing changed; what pip reports as an error is shown.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
venv=$1 python=$2
cpu_index=${TORCH_CPU_INDEX:-}  # address of the package index that holds the CPU builds of torch, where pip does not know one

"$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] < (3, 13))' ||
  { echo "posttrain needs Python 3.11 or 3.12, and $python is $("$python" --version 2>&1); name another: make setup PYTHON=python3.11" >&2; exit 2; }
[ -x "$venv/bin/pip" ] || "$python" -m venv "$venv"

pip() { "$venv/bin/python" -m pip --disable-pip-version-check --no-input "$@"; }
install() { pip install -qq --no-deps "$@"; }
available() { pip install --quiet --dry-run --no-deps --retries 0 --timeout 15 "$@" >/dev/null 2>&1; }

# Linux has two builds of torch under one version. Take the CPU build where one can be found: it is ten times smaller. The other
# build works on a CPU as well, with the libraries that it depends on.
torch=$(grep -E '^torch==' requirements/cpu.txt)
if ! pip freeze 2>/dev/null | grep -qE "^$torch(\+|$)" && [ "$(uname -s)" = Linux ]; then
  if available "$torch+cpu"; then install "$torch+cpu"
  elif [ -n "$cpu_index" ] && available --index-url "$cpu_index" "$torch+cpu"; then install --index-url "$cpu_index" "$torch+cpu"
  else
    echo "setup: pip finds no CPU build of $torch (TORCH_CPU_INDEX names an index that has it); installing the default build with its CUDA libraries, several GB"
    pip install -qq "$torch"
  fi
fi

echo "setup: installing requirements/cpu.txt into $venv"
install -r requirements/cpu.txt
install --no-build-isolation --editable .
