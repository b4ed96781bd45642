"""Messages that passes wait for, and what hides of them."""
