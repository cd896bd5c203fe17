#!/usr/bin/env bash
# Installs requirements/cpu.lock and this project into the Python given as $1.
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
lock=requirements/cpu.lock
torch_cpu_index=https://download.pytorch.org/whl/cpu

pip_install() { "$python" -m pip install --disable-pip-version-check -q --no-deps "$@"; }
fail() { echo "make venv: $1; pip's message is above." >&2; exit 1; }

torch=$(grep '^torch==' "$lock")
echo "venv: installing $torch (CPU build)"
# PyPI's own torch is the CUDA build, so ask for the local version by name first.
pip_install "$torch+cpu" 2>/dev/null ||
  pip_install "$torch+cpu" --index-url "$torch_cpu_index" ||
  fail "no CPU build of $torch could be installed"

echo "venv: installing the $(grep -c '==' "$lock") packages of $lock"
pip_install -r "$lock" || fail "a package of $lock could not be installed"

echo "venv: installing vllm_ddtree and cpu_engine"
pip_install --no-build-isolation -e . -e ./cpu_engine ||
  fail "the project itself could not be installed"
