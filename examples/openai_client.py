#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Chat with a server that runs DDTree, and show how many drafts it accepted.

Start the server with examples/serve.sh. Any OpenAI client works: nothing in the
requests says how the server speculates.
"""

import argparse
import urllib.request

from openai import OpenAI, OpenAIError

PROMPT = "Write a Python function that checks whether a number is prime."
DRAFTS = "vllm:spec_decode_num_drafts_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--url", default="http://localhost:8000")
    parser.add_argument("--prompt", default=PROMPT)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def chat(client: OpenAI, args: argparse.Namespace) -> int:
    """Print the answer as it arrives; returns its number of tokens."""
    model = client.models.list().data[0].id
    stream = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": args.prompt}],
        max_tokens=args.max_tokens,
        temperature=args.temperature,
        seed=args.seed,
        stream=True,
        stream_options={"include_usage": True},
    )
    num_tokens = 0
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            num_tokens = chunk.usage.completion_tokens
    print()
    return num_tokens


def counters(url: str) -> dict[str, float]:
    """The server's counters of drafts, from its Prometheus page."""
    with urllib.request.urlopen(f"{url}/metrics") as response:
        lines = response.read().decode().splitlines()
    values = {DRAFTS: 0.0, ACCEPTED: 0.0}
    for line in lines:
        name = line.split("{")[0]
        if name in values:
            values[name] += float(line.rsplit(" ", 1)[1])
    return values


def main() -> None:
    args = parse_args()
    client = OpenAI(base_url=f"{args.url}/v1", api_key="none", max_retries=0)
    try:
        before = counters(args.url)
        num_tokens = chat(client, args)
        after = counters(args.url)
    except (OSError, OpenAIError) as error:
        raise SystemExit(f"client: {args.url} does not answer: {error}") from error
    drafts = after[DRAFTS] - before[DRAFTS]
    accepted = after[ACCEPTED] - before[ACCEPTED]
    length = 1 + accepted / drafts if drafts else 1.0
    print(f"client: tokens={num_tokens} acceptance_length={length:.2f}")


if __name__ == "__main__":
    main()
