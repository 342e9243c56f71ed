"""``sgl-blend codec``: measure how a model's KV is coded, and what that loses."""
