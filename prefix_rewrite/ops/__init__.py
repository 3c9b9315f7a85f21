"""Tree ops: one folder an op, each with a plain reference beside its fast version."""
