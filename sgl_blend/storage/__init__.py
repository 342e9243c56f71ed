"""Pages of KV as objects of a store: container, names and guarded calls. Knows nothing of SGLang."""
