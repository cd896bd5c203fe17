#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
# Serve a model with DDTree: vLLM's OpenAI-compatible server, on a GPU or a CPU.
#
#   examples/serve.sh MODEL DRAFT [BUDGET [OPTIONS OF vllm serve ...]]
#
# MODEL and DRAFT are folders or names on a model hub; BUDGET is the number of tree
# nodes verified per step, 63 unless given. Talk to it with examples/openai_client.py.
set -euo pipefail

if (($# < 2)); then
	echo "usage: $0 MODEL DRAFT [BUDGET [OPTIONS OF vllm serve ...]]" >&2
	exit 2
fi
model=$1 draft=$2 budget=${3:-63}
shift $(($# < 3 ? $# : 3))

bin=$(dirname "$0")/../.venv/bin
[[ -x $bin/python ]] && PATH=$bin:$PATH

vllm=(vllm)
if python -c 'import ddtree_cpu_engine' 2>/dev/null; then
	vllm=(python -m ddtree_cpu_engine) # vLLM's command line, on a CPU
fi
exec "${vllm[@]}" serve "$model" "$@" --speculative-config \
	"{\"method\": \"ddtree\", \"model\": \"$draft\", \"num_speculative_tokens\": $budget}"
