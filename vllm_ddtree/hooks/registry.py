# SPDX-License-Identifier: Apache-2.0
"""The table of every change this package makes to vLLM, as data."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Hook:
    """One function of vLLM that is replaced by a wrapper of ours.

    Names are ``module:attribute``, the attribute dotted for a method.
    """

    id: str
    target: str
    """The function of vLLM that is replaced."""
    bind_sites: tuple[str, ...]
    """Every place that holds a reference to it, the defining module first."""
    body: str
    """Factory ``wrap(original) -> replacement`` in this folder."""
    stage: str
    """``front_end``: when the plugin loads. ``worker``: when an engine that was
    configured with method ``ddtree`` builds its workers."""
    why: str
    patch: str
    """The upstream patch that makes the hook unnecessary."""
    native: str
    """Exists in a vLLM that has the patch; the hook is then not installed."""
    instead: str | None = None
    """Function of this folder to call where ``native`` exists."""


@dataclass(frozen=True)
class Seam:
    """A place that vLLM offers for extension, used without replacing a function."""

    id: str
    where: str
    body: str
    why: str
    patch: str
    """The upstream patch that makes it unnecessary."""
    native: str
    """Exists in a vLLM that has the patch; the seam is then not used."""


_REGISTRY_PATCH = "0001-Spec-Decode-Registry-for-speculative-methods.patch"
METHOD_PATCH = "0008-Spec-Decode-Add-method-ddtree.patch"
NATIVE_METHOD = "vllm.v1.spec_decode.ddtree:create_config"
"""Exists in a vLLM that has the method itself; the package then does nothing."""

HOOKS: tuple[Hook, ...] = (
    Hook(
        id="speculative-method",
        target="vllm.engine.arg_utils:EngineArgs.create_speculative_config",
        bind_sites=("vllm.engine.arg_utils:EngineArgs.create_speculative_config",),
        body="vllm_ddtree.hooks.engine_args:wrap_create_speculative_config",
        stage="front_end",
        why="SpeculativeConfig.method is a closed list without 'ddtree'.",
        patch=_REGISTRY_PATCH,
        native="vllm.v1.spec_decode.registry:register_speculative_method",
        instead="vllm_ddtree.hooks.engine_args:register_method",
    ),
    Hook(
        id="sampling-params",
        target="vllm.sampling_params:SamplingParams._validate_spec_decode",
        bind_sites=("vllm.sampling_params:SamplingParams._validate_spec_decode",),
        body="vllm_ddtree.hooks.sampling_params:wrap_validate_spec_decode",
        stage="front_end",
        why="vLLM refuses min_p and logit_bias with any speculation; a tree's nodes "
        "are sampled with both.",
        patch="0004-Spec-Decode-A-speculative-method-validates-sampling-.patch",
        native="vllm.config:SpeculativeConfig.validate_sampling_params",
    ),
    Hook(
        id="speculator",
        target="vllm.v1.worker.gpu.spec_decode:init_speculator",
        bind_sites=(
            "vllm.v1.worker.gpu.spec_decode:init_speculator",
            "vllm.v1.worker.gpu.model_runner:init_speculator",
        ),
        body="vllm_ddtree.hooks.runner:wrap_init_speculator",
        stage="worker",
        why="Speculators are chosen by a chain of ifs over known methods.",
        patch=_REGISTRY_PATCH,
        native="vllm.v1.spec_decode.registry:register_speculative_method",
    ),
    Hook(
        id="cpu-attention-backend",
        target="vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",
        bind_sites=("vllm.platforms.cpu:CpuPlatform.get_attn_backend_cls",),
        body="vllm_ddtree.hooks.cpu_platform:wrap_get_attn_backend_cls",
        stage="worker",
        why="On a CPU vLLM ignores the selected attention backend, CUSTOM included.",
        patch="0003-CPU-Honour-a-custom-attention-backend.patch",
        native="vllm.platforms.cpu:CpuPlatform.selectable_attn_backends",
    ),
)

TARGET_MODEL_STATE = Seam(
    id="target-model-state",
    where="`get_model_state_cls` of the target model",
    body="vllm_ddtree.hooks.speculator:PluginSpeculator.load_draft_model",
    why="The model alone chooses who prepares and verifies its batches.",
    patch="0002-Spec-Decode-A-speculator-may-bring-the-target-s-mode.patch",
    native="vllm.v1.worker.gpu.spec_decode.speculator:"
    "BaseSpeculator.get_target_model_state_cls",
)
DRAFT_PATHS = Seam(
    id="draft-paths",
    where="`logits_processors` and `thinking_budget_state` of the engine's `Sampler`",
    body="vllm_ddtree.path_processors:NodeLogits",
    why="Logits processing takes the drafts before a row to be the rows above it.",
    patch="0005-Spec-Decode-Logits-processing-of-drafts-that-branch.patch",
    native="vllm.v1.worker.gpu.sample.logits_processor.interface:DraftPaths",
)
SEAMS: tuple[Seam, ...] = (
    TARGET_MODEL_STATE,
    DRAFT_PATHS,
    Seam(
        id="attention-backend",
        where="`register_backend(AttentionBackendEnum.CUSTOM, ...)`",
        body="vllm_ddtree.hooks.worker:WorkerExtension",
        why="vLLM has no tree attention.",
        patch=METHOD_PATCH,
        native=NATIVE_METHOD,
    ),
    Seam(
        id="sharded-logits",
        where="`compute_logits` of the target model, with tensor parallelism",
        body="vllm_ddtree.shard_verifier:ShardVerifier",
        why="vLLM gathers the logits of all rows before it asks who samples them.",
        patch=METHOD_PATCH,
        native=NATIVE_METHOD,
    ),
    Seam(
        id="worker-extension",
        where="`ParallelConfig.worker_extension_cls`",
        body="vllm_ddtree.hooks.worker:WorkerExtension",
        why="Workers install the hooks of their stage before they are built.",
        patch=METHOD_PATCH,
        native=NATIVE_METHOD,
    ),
)

DEPENDS_ON: tuple[str, ...] = (
    "vllm.config.vllm:VllmConfig.num_lookahead_tokens",
    "vllm.v1.worker.gpu.lora_utils:LoraState.make_lora_inputs",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.load_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_inputs",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.execute_model",
    "vllm.v1.worker.gpu.model_runner:GPUModelRunner.sample_tokens",
    "vllm.v1.worker.gpu.model_states.default:DefaultModelState.prepare_attn",
    "vllm.v1.worker.gpu.sample.bad_words:BadWordsState.apply",
    "vllm.v1.worker.gpu.sample.bad_words:apply_bad_words",
    "vllm.v1.worker.gpu.sample.logprob:compute_topk_scores",
    "vllm.v1.worker.gpu.sample.penalties:PenaltiesState.apply",
    "vllm.v1.worker.gpu.sample.penalties:apply_penalties",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.__init__",
    "vllm.v1.worker.gpu.sample.sampler:Sampler.apply_sampling_params",
    "vllm.v1.worker.gpu.sample.thinking_budget:ThinkingBudgetState.apply",
    "vllm.v1.worker.gpu.sample.thinking_budget:apply_thinking_budget",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.__init__",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator.propose",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:DFlashSpeculator._generate_draft",
    "vllm.v1.worker.gpu.spec_decode.dflash.speculator:prepare_dflash_inputs",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler.__call__",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:"
    "RejectionSampler._verify_in_chunks",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler:RejectionSampler._verify",
)
"""Functions of vLLM that the package does not replace but whose behaviour it
builds on; they are part of the fingerprint."""
