"""Passes of one rank that run beside each other, so that none waits for the network while another can compute."""
