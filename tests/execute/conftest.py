"""Tests that run steps need four CPU devices, which a process has from its start: `test_four_devices` starts one."""

import os

FLAG = "--xla_force_host_platform_device_count=4"
collect_ignore = [] if FLAG in os.environ.get("XLA_FLAGS", "") else ["four_devices"]
