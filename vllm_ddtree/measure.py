# SPDX-License-Identifier: Apache-2.0
"""Drive an engine to measure it: steady steps, and generation at a concurrency."""

import gc
import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from vllm import LLM, RequestOutput, SamplingParams
from vllm.platforms import current_platform
from vllm.sampling_params import RequestOutputKind

WARM_STEPS = 8

_request_ids = itertools.count()


@contextmanager
def started_engine(
    model: str, speculative: Mapping[str, Any] | None, **options: Any
) -> Iterator[LLM]:
    """An engine that is gone, with its memory, when the block ends."""
    if speculative is not None:
        options["speculative_config"] = dict(speculative)
        options["per_request_spec_decode_metrics"] = "detailed"
    if current_platform.is_cpu():
        options["enforce_eager"] = True
    llm = LLM(model, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.unfreeze()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def random_prompt(llm: LLM, length: int, seed: int) -> list[int]:
    chooser = random.Random(seed)
    vocab_size = llm.model_config.get_vocab_size()
    return [chooser.randrange(vocab_size) for _ in range(length)]


def step_times(
    llm: LLM,
    batch_size: int,
    context: int,
    num_steps: int,
    temperature: float = 0.0,
    on_steady: Callable[[], None] | None = None,
) -> list[float]:
    """Seconds between the outputs of successive decode steps, in steady state.

    `batch_size` requests of `context` random tokens decode together; steps with a
    prefill and the first few after it are left out. `on_steady` is called before the
    first step that counts.

    Raises:
        RuntimeError: not all requests took part in every step, for example because
            the KV cache is too small for them.

    """
    assert llm.model_config.max_model_len is not None
    params = SamplingParams(
        temperature=temperature,
        max_tokens=llm.model_config.max_model_len - context,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )
    engine = llm.llm_engine
    ids = [f"step-{next(_request_ids)}" for _ in range(batch_size)]
    for seed, request_id in enumerate(ids):
        prompt: Any = {"prompt_token_ids": random_prompt(llm, context, seed)}
        engine.add_request(request_id, prompt, params)
    try:
        waiting = set(ids)
        while waiting:
            waiting -= {output.request_id for output in _next_outputs(llm)}
        ends = []
        for step in range(WARM_STEPS + num_steps + 1):
            if step == WARM_STEPS and on_steady is not None:
                on_steady()
            outputs = _next_outputs(llm)
            ends.append(time.perf_counter())
            if len(outputs) < batch_size or any(output.finished for output in outputs):
                raise RuntimeError(
                    f"Only {len(outputs)} of {batch_size} requests with {context} "
                    "tokens of context decode together: give the engine more memory "
                    "or a larger max_model_len, or measure fewer steps."
                )
    finally:
        engine.abort_request(ids)
        while engine.has_unfinished_requests():
            engine.step()
    times = [end - start for start, end in itertools.pairwise(ends)]
    return times[WARM_STEPS:]


def _next_outputs(llm: LLM) -> list[Any]:
    """Outputs of the next step that has any."""
    engine = llm.llm_engine
    while engine.has_unfinished_requests():
        outputs = engine.step()
        if outputs:
            return outputs
    raise RuntimeError("All requests ended before the measurement did.")


@dataclass(frozen=True)
class Generation:
    seconds: float
    outputs: list[RequestOutput]

    @property
    def num_tokens(self) -> int:
        return sum(len(output.outputs[0].token_ids) for output in self.outputs)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def acceptance_histogram(self) -> list[int]:
        """How many verify steps accepted 0, 1, 2, ... drafts."""
        totals: list[int] = []
        for output in self.outputs:
            metrics = output.outputs[0].spec_decode_metrics
            if metrics is None:
                continue
            histogram = list(metrics.histogram)
            totals += [0] * (len(histogram) - len(totals))
            for count, times in enumerate(histogram):
                totals[count] += times
        return totals

    @property
    def tokens_per_step(self) -> float:
        """Mean tokens of a verify step, the bonus included; 1 without speculation."""
        histogram = self.acceptance_histogram
        if not sum(histogram):
            return 1.0
        accepted = sum(count * times for count, times in enumerate(histogram))
        return 1 + accepted / sum(histogram)


def generate(
    llm: LLM,
    prompts: Sequence[Sequence[int]],
    params: SamplingParams,
    concurrency: int,
) -> Generation:
    """Generate for all prompts with `concurrency` of them in flight at any time."""
    params = params.clone()
    params.output_kind = RequestOutputKind.FINAL_ONLY
    engine = llm.llm_engine
    waiting = list(reversed(prompts))
    outputs: list[Any] = []
    num_running = 0
    started = time.perf_counter()
    while waiting or num_running:
        while waiting and num_running < concurrency:
            prompt: Any = {"prompt_token_ids": list(waiting.pop())}
            engine.add_request(f"generate-{next(_request_ids)}", prompt, params)
            num_running += 1
        finished = [output for output in engine.step() if output.finished]
        outputs += finished
        num_running -= len(finished)
    return Generation(time.perf_counter() - started, outputs)


def chat_prompt(llm: LLM, text: str) -> list[int]:
    """Token ids of a user's message in the model's chat format, if it has one."""
    tokenizer: Any = llm.get_tokenizer()
    if getattr(tokenizer, "chat_template", None):
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}],
            tokenize=False,
            add_generation_prompt=True,
        )
    return tokenizer(text)["input_ids"]


def capture_sizes(num_drafts: int, batch_sizes: Sequence[int]) -> list[int]:
    """`cudagraph_capture_sizes`, which count tokens, for these decode batches."""
    return [(num_drafts + 1) * batch_size for batch_size in sorted(batch_sizes)]
