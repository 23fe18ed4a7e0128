"""Values as JSON and tensors, exactly and without pickle, and back without running anything."""
