"""``sgl-blend plan-storage``: where to keep chunks."""
