"""Promise: parsers accept or refuse every input, in bounded time and memory.

Each target is a program for atheris.
"""
