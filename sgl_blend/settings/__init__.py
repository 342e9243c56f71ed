"""What the operator chose."""
