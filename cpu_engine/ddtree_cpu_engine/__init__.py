# SPDX-License-Identifier: Apache-2.0
"""A Triton backend named ``cpu`` that compiles nothing.

vLLM on a CPU turns Triton on when a backend of that name exists. Under
``TRITON_INTERPRET=1`` no kernel is ever compiled, so announcing one is enough.
"""
