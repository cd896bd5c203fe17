# SPDX-License-Identifier: Apache-2.0
"""The interpreter as the engine's workers have it."""

from ddtree_cpu_engine import interpreter_masks, interpreter_speed

interpreter_masks.install()
interpreter_speed.install()
