"""Names of the levels at which chunks can be stored, for settings that need no more than that."""

LOSSLESS = "lossless"
CODED = ("q8", "q4", "q4-1.5", "q4-2.0")
LEVEL_NAMES = (LOSSLESS, *CODED)
"""From the finest to the coarsest."""
