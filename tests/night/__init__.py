"""The night: test files that have more tests, or run more cases, with MEGATRON_EXT_NIGHTLY=1."""
