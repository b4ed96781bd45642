"""What passes, messages and memory take, as they ran."""
