"""What is measured at start (times, kernels, one trial forward), and formulas over measured times."""
