"""Repeated text in prompts without markup: where known chunks begin, and what is worth keeping."""
