"""What families that search share: orders timed and filled, packed, bounded, certified, kept."""
