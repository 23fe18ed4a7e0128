"""What people and programs read: text and JSON made of checkpoints."""
