"""Kernel libraries: how their own functions are called, by full name, one file a library.

A model that calls a library's function, by whatever name its file has for it, shows the call by
the leaf of the mixer that the function is. Nothing is imported: a function of a package that
isn't loaded can't be called either.
"""
