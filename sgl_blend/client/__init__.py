"""What a client program imports; it needs neither torch nor SGLang."""
