"""The blended forward: what a step reuses, and how it runs."""
