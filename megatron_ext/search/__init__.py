"""Parts of searching families: orders timed and filled, packed, bounded, certified, cached."""
