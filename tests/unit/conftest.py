"""Rules that need neither a server nor a job of a compiler: keys, words, formats, numbers."""
