"""The command line: `modelstate inspect | plan | load | explain | demo`."""
