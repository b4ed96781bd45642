"""Measurement of passes, messages and memory in real steps.

Measuring must not change what is measured: nothing is synchronized while the passes run.
"""
