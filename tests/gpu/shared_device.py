# SPDX-License-Identifier: Apache-2.0
"""Engine options for tests that run side by side on one device."""

from types import MappingProxyType

# Profiling the free memory would need the device for itself.
SHARED_DEVICE = MappingProxyType(
    {"gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 1 << 30}
)
