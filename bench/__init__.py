"""What loading costs, beside the ways that people use today. `python -m bench --help`."""
