"""The command line: `modelstate inspect`, `plan`, `load`, `convert`, `verify`, `store`, `live` and more."""
