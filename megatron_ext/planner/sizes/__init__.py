"""Other parallel sizes for a described training job: their space, estimates and search.

The best schedule for given sizes may be worse than stock's with other sizes, and there are
thousands of combinations.
"""
