"""What autograd saves between F and W: offloaded to the host, or computed again."""
