"""Graph passes: one a file, run in the order of `pipeline.py`."""
