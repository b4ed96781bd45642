"""What people look at: pictures, traces, and words about where the time went."""
