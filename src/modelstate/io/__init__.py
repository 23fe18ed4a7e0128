"""Reading and writing bytes: the engine that executes read requests, atomic files, memory, leases, locks."""
