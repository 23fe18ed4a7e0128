"""The command line: `modelstate inspect | plan | load | demo`."""
