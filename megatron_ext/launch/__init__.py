"""A script launched under patches, and launch commands read, planned and checked."""
