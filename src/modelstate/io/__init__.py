"""Reading and writing bytes: files, the engine that executes read requests, memory, leases, locks."""
