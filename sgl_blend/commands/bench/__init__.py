"""How fast: a blending server beside stock SGLang, in time to first token and in throughput."""
