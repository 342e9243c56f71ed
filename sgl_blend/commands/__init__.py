"""Everything behind ``sgl-blend``."""
