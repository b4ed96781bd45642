"""Features that a folder holds whole, in parts by level."""
