"""The night: files whose tests are more, or run more cases, with MEGATRON_EXT_NIGHTLY=1."""
