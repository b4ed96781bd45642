"""A launch line checked without a GPU, and what is installed here."""
