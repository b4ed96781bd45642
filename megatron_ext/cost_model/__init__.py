"""Costs and bytes of a real model: from its dimensions and a GPU's rates, or measured."""
