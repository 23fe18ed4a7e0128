"""Parts for other libraries' training loops, each in a module that imports its library."""
