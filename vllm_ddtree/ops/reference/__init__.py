# SPDX-License-Identifier: Apache-2.0
"""The same operations in plain torch and Python: the specification of the kernels."""
