"""Promise: rules about keys, words, formats and numbers hold for every input.

The tests need neither a server nor a compiler.
"""
