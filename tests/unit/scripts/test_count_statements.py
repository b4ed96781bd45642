"""Tests of scripts/count_statements.py, which measures the size of the product so that no change of
layout makes it smaller."""

from scripts.count_statements import PRODUCT, counted, statements

SOURCE = '''"""Docstring of the module."""
import os  # a comment


def f(x):
    """Docstring."""
    if x: return (
        1
    )
    "a string that is no docstring"
'''


def test_a_statement_counts_once_and_a_docstring_not_at_all() -> None:
    assert statements(SOURCE) == len(["import", "def", "if", "return", "string"])


BLOCKS = """
try:
    pass
except OSError:
    pass
else:
    for x in y: pass
    else: pass
finally:
    match x:
        case 1: pass
"""


def test_statements_of_every_block_count() -> None:
    assert statements(BLOCKS) == len(["try", "for", "match"]) + BLOCKS.count("pass")


def test_product_and_scripts_are_found() -> None:
    counts = counted()
    assert all(counts[folder] > 1_000 for folder in (*PRODUCT, "scripts"))
