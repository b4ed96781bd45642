"""Observers of training steps: traces, measured costs, the report on the split."""
