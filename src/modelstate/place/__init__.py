"""From a plan to a changed module: values into their places, all of them or none."""
