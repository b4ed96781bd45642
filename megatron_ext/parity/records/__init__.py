"""What the ranks of a run recorded, and how two recordings differ."""
