#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
#
# Every measurement and GPU test, in the order in which a short GPU session is best
# spent, each command within ten minutes.
#
#   benchmarks/session.sh OUT [STAGE...]      run all stages, or those named
#   benchmarks/session.sh --list              name them, with expected durations
#
# OUT receives the results and a log per stage. A stage that fails does not stop the
# rest; the exit status says whether any did. On a machine without .git, pass the
# revision in DDTREE_GIT_SHA. MODEL and DRAFT name the real pair of the last stages;
# those stages are skipped where MODEL is not there.
set -uo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
MODEL=${MODEL:-.models/SmolLM2-135M-Instruct}
DRAFT=${DRAFT:-models/smollm2-135m-dflash}
STAGE_LIMIT_S=${STAGE_LIMIT_S:-590}
export VLLM_USE_FLASHINFER_SAMPLER=${VLLM_USE_FLASHINFER_SAMPLER:-0}
export VLLM_NO_USAGE_STATS=1 PYTHONUNBUFFERED=1

# name | expected minutes, for the stages that have run on an H200 with 16 cores as it took
# there, for others a guess | command.
STAGES=(
  "test-stress|3|$PYTHON -m pytest -q -s tests/gpu/test_stress.py"
  "test-gpu|3|ls tests/gpu/test_*.py | grep -v stress | xargs -P 8 -n 1 $PYTHON -m pytest -q -s -p no:cacheprovider"
  "test-ops|5|export DDTREE_EXAMPLES=2000; ls tests/ops/test_*.py | grep -v compile | xargs -P 14 -n 1 $PYTHON -m pytest -q -m gpu -p no:cacheprovider"
  "ops|3|$PYTHON -m benchmarks.ops --out OUT"
  "steps-8b-512|7|$PYTHON -m benchmarks.engine steps --contexts 512 --batch-sizes 1 8 --budgets 63 127 --out OUT --name steps-8b-512"
  "profile-8b|7|$PYTHON -m benchmarks.engine profile --budgets 63 --out OUT --name profile-8b"
  "attention-1|5|$PYTHON -m benchmarks.attention --batch-sizes 1 --out OUT --name attention-1"
  "attention-8|7|$PYTHON -m benchmarks.attention --batch-sizes 8 --out OUT --name attention-8"
  "attention-32|9|$PYTHON -m benchmarks.attention --batch-sizes 32 --out OUT --name attention-32"
  "steps-8b-8k|9|$PYTHON -m benchmarks.engine steps --contexts 2048 8192 --batch-sizes 1 8 --budgets 63 127 --out OUT --name steps-8b-8k"
  "steps-8b-narrow|8|$PYTHON -m benchmarks.engine steps --contexts 512 --methods chain tree --budgets 7 15 31 --out OUT --name steps-8b-narrow"
  "steps-8b-wide|9|$PYTHON -m benchmarks.engine steps --contexts 512 --methods chain tree --budgets 63 127 255 --out OUT --name steps-8b-wide"
  "steps-30b-a3b|9|$PYTHON -m benchmarks.engine steps --shape qwen3-30b-a3b --contexts 512 --batch-sizes 1 8 32 --budgets 31 63 127 --out OUT --name steps-30b-a3b"
  "profile-30b-a3b|8|$PYTHON -m benchmarks.engine profile --shape qwen3-30b-a3b --budgets 63 --out OUT --name profile-30b-a3b"
  "pair-greedy|9|$PYTHON -m benchmarks.engine pair --model $MODEL --draft $DRAFT --temperatures 0 --out OUT --name pair-greedy"
  "pair-sampled|9|$PYTHON -m benchmarks.engine pair --model $MODEL --draft $DRAFT --temperatures 1 --out OUT --name pair-sampled"
  "tune|9|$PYTHON -m vllm_ddtree.tune $MODEL $DRAFT --batch-sizes 1 4 16 64 --prompts benchmarks/prompts/humaneval.jsonl --json OUT/tune.json --plot OUT/tune.png --engine-args '{\"compilation_config\": {\"mode\": 0, \"cudagraph_mode\": \"FULL_DECODE_ONLY\"}}'"
  "test-ops-all|10|ls tests/ops/test_*.py | grep -v compile | xargs -P 14 -n 1 $PYTHON -m pytest -q -m gpu -p no:cacheprovider"
)

if [[ ${1:-} == --list ]]; then
  for stage in "${STAGES[@]}"; do
    IFS='|' read -r name minutes command <<<"$stage"
    printf '%-18s about %2s min  %s\n' "$name" "$minutes" "$command"
  done
  exit 0
fi
if [[ $# -lt 1 ]]; then
  sed -n '4,15p' "$0" >&2
  exit 2
fi

OUT=$1
shift
mkdir -p "$OUT"
failed=()
for stage in "${STAGES[@]}"; do
  IFS='|' read -r name minutes command <<<"$stage"
  if [[ $# -gt 0 && " $* " != *" $name "* ]]; then
    continue
  fi
  if [[ $command == *pytest* ]] && ! $PYTHON -c 'import hypothesis, pytest'; then
    echo "== $name: skipped, pytest or hypothesis is not installed"
    continue
  fi
  if [[ $command == *"$MODEL"* && ! -f $MODEL/config.json ]]; then
    echo "== $name: skipped, $MODEL is not there"
    continue
  fi
  command=${command//OUT/$OUT}
  echo "== $name: about $minutes min: $command"
  started=$SECONDS
  timeout "$STAGE_LIMIT_S" bash -c "$command" >"$OUT/$name.log" 2>&1
  status=$?
  echo "== $name: status $status after $((SECONDS - started)) s, log $OUT/$name.log"
  if [[ $status -ne 0 ]]; then
    failed+=("$name")
    tail -n 15 "$OUT/$name.log"
  fi
done
if [[ ${#failed[@]} -gt 0 ]]; then
  echo "failed: ${failed[*]}"
  exit 1
fi
