"""Answer quality, measured through the real engine: what ``sgl-blend eval`` is made of."""
