"""What is measured once at start: times, kernels, one trial forward."""
