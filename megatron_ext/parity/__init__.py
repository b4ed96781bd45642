"""Check that two launch commands train to the same numbers."""
