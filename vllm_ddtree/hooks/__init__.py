# SPDX-License-Identifier: Apache-2.0
"""The only folder that changes vLLM. `registry` lists every change and why."""
