# SPDX-License-Identifier: Apache-2.0
"""Makes the tiny target/drafter pairs of `tests/assets`."""
