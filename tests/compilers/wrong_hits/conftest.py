"""Promise: two programs share a key only if they compile to the same executable.

Written pairs and generated programs differ in one place, and state whether their keys may be equal.
"""
