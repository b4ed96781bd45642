"""What watches a training step: traces, measured costs, the report on the split."""
