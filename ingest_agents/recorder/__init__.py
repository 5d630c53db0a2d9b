"""What runs inside the trainer: records ops, never blocks, never raises into training."""
