"""Messages that passes wait for, and the part of them that other work overlaps."""
