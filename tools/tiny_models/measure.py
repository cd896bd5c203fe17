# SPDX-License-Identifier: Apache-2.0
"""Measure a pair in the real engine, on the CPU.

    python tools/tiny_models/measure.py tests/assets/tiny-qwen3

Runs vLLM without speculation and with stock `method: dflash` on the same prompts and
prints one line of JSON: whether the greedy tokens are the same, and the acceptance
length (1 + accepted / drafts) at temperature 0 and 1.
"""

import argparse
import json
import os
import random
from pathlib import Path

os.environ.update(
    HF_HUB_OFFLINE="1",
    TRITON_INTERPRET="1",
    VLLM_CPU_KVCACHE_SPACE="1",
    VLLM_CPU_OMP_THREADS_BIND="nobind",
    VLLM_ENABLE_V1_MULTIPROCESSING="0",
    VLLM_LOGGING_LEVEL="WARNING",
    VLLM_USE_V2_MODEL_RUNNER="1",
)

from language import Language
from vllm import LLM, SamplingParams


def start(pair: Path, speculative: bool) -> LLM:
    """The engine for one pair."""
    options: dict = {}
    if "kv_lora_rank" in json.loads((pair / "target/config.json").read_text()):
        # The AMX backend is for bfloat16 only, and vLLM 0.32's CPU kernel for rotary
        # embeddings takes the heads of MLA's 3-D query for tokens.
        options["attention_config"] = {"backend": "CPU_MLA"}
        options["compilation_config"] = {"custom_ops": ["all", "-rotary_embedding"]}
    if speculative:
        config = json.loads((pair / "draft/config.json").read_text())
        options["speculative_config"] = {
            "method": "dflash",
            "model": str(pair / "draft"),
            "num_speculative_tokens": config["block_size"] - 1,
        }
    return LLM(
        str(pair / "target"),
        dtype="float32",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=4,
        max_num_batched_tokens=512,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **options,
    )


def generate(llm: LLM, prompts: list[list[int]], temperature: float, tokens: int):
    """Token ids of every prompt, and the acceptance length if there are drafts."""
    before = counters(llm)
    params = SamplingParams(
        temperature=temperature, seed=1, max_tokens=tokens, ignore_eos=True
    )
    requests = [{"prompt_token_ids": p} for p in prompts]
    outputs = llm.generate(requests, params, use_tqdm=False)
    accepted, drafts = (a - b for a, b in zip(counters(llm), before, strict=True))
    length = round(1 + accepted / drafts, 2) if drafts else None
    return [list(o.outputs[0].token_ids) for o in outputs], length


def counters(llm: LLM) -> tuple[int, int]:
    """Accepted draft tokens and drafts so far."""
    values = {m.name: getattr(m, "value", 0) for m in llm.get_metrics()}
    prefix = "vllm:spec_decode_num_"
    return values.get(prefix + "accepted_tokens", 0), values.get(prefix + "drafts", 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pair", type=Path)
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64)
    args = parser.parse_args()
    rng = random.Random(6)
    texts = Language(0).stream(rng, 32)
    prompts = [next(texts)[: rng.randrange(4, 32)] for _ in range(args.prompts)]
    plain, _ = generate(start(args.pair, False), prompts, 0.0, args.tokens)
    llm = start(args.pair, True)
    greedy, greedy_length = generate(llm, prompts, 0.0, args.tokens)
    _, sampled_length = generate(llm, prompts, 1.0, args.tokens)
    result = {
        "pair": args.pair.name,
        "greedy_tokens_equal": greedy == plain,
        "distinct_greedy_tokens": len({t for row in plain for t in row}),
        "acceptance_length": {"T=0": greedy_length, "T=1": sampled_length},
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
