"""Mixers: one file for each kind of call that moves information between tokens.

A file says where a model shows the call (its seams), how the call's arguments are read, what of
them can't be run exactly on a forest, and which tree op replaces it. The maths is in `ops/`.
"""
