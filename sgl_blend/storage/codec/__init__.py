"""CacheGen's idea: KV in few bits. Levels, quantiser, entropy coding and coded pages."""
