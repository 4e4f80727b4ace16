"""What runs on each GPU: one training loop over two Protocols, recovery and checkpointing."""
