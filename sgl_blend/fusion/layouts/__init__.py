"""What KV looks like in the pool: a file for each kind."""
