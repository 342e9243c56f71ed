"""CacheBlend for SGLang, as a plugin."""
