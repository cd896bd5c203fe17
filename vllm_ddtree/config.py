# SPDX-License-Identifier: Apache-2.0
"""What a user may ask for with ``{"method": "ddtree", ...}``, and its checks.

Every check runs while vLLM builds its configuration, before a worker starts.
"""

import difflib
from dataclasses import fields
from typing import Any, Literal

from pydantic import Field
from transformers import PretrainedConfig
from vllm.config import ModelConfig, ParallelConfig, SpeculativeConfig
from vllm.config.utils import config
from vllm.sampling_params import SamplingParams
from vllm.v1.spec_decode.dynamic.utils import (
    validate_and_normalize_dynamic_sd_schedule,
)

from vllm_ddtree.request_limits import check_request

MAX_BUDGET = 1024

DEFAULT_BUDGET = 63
DEFAULT_SCHEDULE = ((1, 2, 63), (3, 8, 31), (9, 1024, 15))
"""Budgets by batch size when the user names none: wide trees while verification
is bound by reading weights, the chain's own width where it no longer is."""

# How a DFlash checkpoint names itself: speculators' type, or an architecture.
_DFLASH_KINDS = (
    "dflash",
    "DFlashDraftModel",
    "DFlashLagunaForCausalLM",
    "DFlashMuseGlimmerAssistantModel",
    "MuseGlimmerAssistantModel",
)

# Keys of SpeculativeConfig that have no meaning for a tree, and why.
_REFUSED_KEYS = {
    "rejection_sample_method": "the tree is verified by sample-and-walk; "
    "use ddtree_acceptance",
    "synthetic_acceptance_rates": "a tree has no per-position acceptance rate",
    "synthetic_acceptance_length": "a tree has no per-position acceptance rate",
    "draft_sample_method": "a tree takes the most probable drafts",
    "enable_adaptive_verification": "budgets come from num_speculative_tokens and "
    "num_speculative_tokens_per_batch_size",
    "use_local_argmax_reduction": "the vocabulary-parallel top-k is always on",
    "parallel_drafting": "DFlash always drafts in parallel",
}


# vLLM's own __repr__ is short; a generated one would print both models' configs.
@config(repr=False)
class DDTreeSpeculativeConfig(SpeculativeConfig):
    """vLLM's speculative configuration with the options of DDTree.

    To the rest of vLLM it is ``method="dflash"``: many of vLLM's decisions (target
    features, KV groups, lookahead slots) are the drafter's and read that name.
    ``num_speculative_tokens`` is the largest number of tree nodes a step can hold;
    the draft block is always the one of the checkpoint (`num_draft_steps`).
    """

    ddtree_acceptance: Literal["rejection", "typical"] = "rejection"
    """How drafts are accepted. ``rejection`` is lossless at every temperature.
    ``typical`` (arXiv 2401.10774, section 3.3.1) is lossy: it accepts any draft
    that is plausible enough under the target."""
    ddtree_typical_epsilon: float = Field(default=0.09, gt=0.0, lt=1.0)
    """``typical`` only: probability above which a draft is always accepted."""
    ddtree_typical_delta: float = Field(default=0.3, gt=0.0, le=1.0)
    """``typical`` only: scale of the entropy-dependent threshold."""
    ddtree_temper_drafts: bool = False
    """Apply a request's temperature to the drafter's distributions before the tree
    is built. Changes which drafts are verified, never the output's distribution."""
    ddtree_keep_spine: bool = False
    """Always keep the greedy chain in the tree, even where better nodes exist."""
    ddtree_check_ranks: bool = False
    """Debugging: compare tree, walk and commit across tensor-parallel ranks in
    every step and stop with an error when they differ."""

    num_draft_steps: int = Field(default=0, ge=0)
    """Derived, not for users: tokens the drafter predicts per step, which is the
    checkpoint's block size minus one."""

    def validate_sampling_params(self, params: SamplingParams) -> None:
        # No parameter is refused: every node is sampled as plain decoding would.
        check_request(params)

    @property
    def max_num_new_slots_for_drafting(self) -> int:
        # One bonus query is part of the scheduled tokens already.
        return self.num_draft_steps


def create_ddtree_config(
    user: dict[str, Any],
    target_model_config: ModelConfig,
    target_parallel_config: ParallelConfig,
) -> DDTreeSpeculativeConfig:
    """Turn the user's dictionary into a checked configuration.

    Args:
        user: the value of ``--speculative-config``, ``method`` included.
        target_model_config: the target's model configuration.
        target_parallel_config: the target's parallel configuration.

    Raises:
        ValueError: an option is unknown, missing or cannot work; the message says
            what was found and what to change.

    """
    options = {key: value for key, value in user.items() if key != "method"}
    _check_keys(options)
    budget, schedule = _resolve_budget(options)
    num_draft_steps = _draft_block_size(options) - 1
    # vLLM reserves KV slots by num_speculative_tokens, and the draft block needs its
    # own: a budget below the block is therefore a schedule below that number.
    capacity = max(budget, num_draft_steps)
    is_constant = {nodes for *_, nodes in schedule} == {capacity}
    spec = DDTreeSpeculativeConfig(
        **options
        | {
            "method": "dflash",
            "num_speculative_tokens": capacity,
            "num_speculative_tokens_per_batch_size": None if is_constant else schedule,
            "num_draft_steps": num_draft_steps,
            "target_model_config": target_model_config,
            "target_parallel_config": target_parallel_config,
        }
    )
    # The drafter is fed positions up to the target's limit.
    spec._maybe_override_draft_max_position_embeddings(
        spec.draft_model_config.hf_config, target_model_config.max_model_len
    )
    return spec


def _check_keys(options: dict[str, Any]) -> None:
    known = {field.name for field in fields(DDTreeSpeculativeConfig)}
    known -= {
        "target_model_config",
        "target_parallel_config",
        "num_draft_steps",
        "registered_method",
    }
    for key in options:
        if key in _REFUSED_KEYS:
            raise ValueError(
                f"speculative_config['{key}'] is not an option of method 'ddtree': "
                f"{_REFUSED_KEYS[key]}. Remove it."
            )
        if key not in known:
            close = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f" Did you mean '{close[0]}'?" if close else " Remove it."
            raise ValueError(
                f"speculative_config['{key}'] is not an option of method 'ddtree'."
                + hint
            )
    if not options.get("model"):
        raise ValueError(
            "speculative_config for method 'ddtree' needs 'model': the path or hub "
            "name of a DFlash drafter trained for this target."
        )


def _resolve_budget(
    options: dict[str, Any],
) -> tuple[int, list[tuple[int, int, int]]]:
    """The node budget and its schedule by batch size."""
    budget = options.get("num_speculative_tokens")
    schedule = options.get("num_speculative_tokens_per_batch_size")
    if budget is None:
        budget = DEFAULT_BUDGET
        schedule = schedule or list(DEFAULT_SCHEDULE)
    if isinstance(budget, bool) or not isinstance(budget, int):
        raise ValueError(
            f"num_speculative_tokens={budget!r} is not a whole number; it is the "
            "number of tree nodes verified per step, for example 63."
        )
    if not 1 <= budget <= MAX_BUDGET:
        raise ValueError(
            f"num_speculative_tokens={budget} is outside 1..{MAX_BUDGET}: it is the "
            "number of tree nodes verified per step, for example 63."
        )
    if schedule is None:
        return budget, [(1, 1, budget)]
    schedule = validate_and_normalize_dynamic_sd_schedule(schedule)
    for first, last, nodes in schedule:
        if not 1 <= nodes <= budget:
            raise ValueError(
                f"num_speculative_tokens_per_batch_size asks for {nodes} nodes at "
                f"batch sizes {first} to {last}, outside 1..{budget}; raise "
                "num_speculative_tokens or lower the entry."
            )
    return budget, schedule


def _draft_block_size(options: dict[str, Any]) -> int:
    """The block size in the drafter's config.json, z-lab or speculators format."""
    model = options["model"]
    try:
        raw, _ = PretrainedConfig.get_config_dict(
            model, revision=options.get("revision")
        )
    except (OSError, ValueError) as error:
        raise ValueError(
            f"The drafter '{model}' could not be read: {str(error).splitlines()[0]} "
            "Set speculative_config['model'] to the folder or hub name of a DFlash "
            "drafter."
        ) from error
    kinds = [raw.get("speculators_model_type"), *(raw.get("architectures") or [])]
    if not any(kind in _DFLASH_KINDS for kind in kinds):
        found = ", ".join(str(kind) for kind in kinds if kind) or "nothing known"
        raise ValueError(
            f"'{model}' is no DFlash drafter (its config.json names {found}); method "
            "'ddtree' needs a DFlash checkpoint, for example "
            "z-lab/Qwen3-8B-DFlash-b16."
        )
    block_size = raw.get("block_size")
    if not isinstance(block_size, int) or not 2 <= block_size <= 64:
        raise ValueError(
            f"'{model}' has block_size={block_size!r} in its config.json; method "
            "'ddtree' needs the block size the drafter was trained with, 2 to 64."
        )
    return block_size
