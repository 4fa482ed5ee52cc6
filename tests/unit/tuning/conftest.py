"""Promise: a space holds exactly the schedules that exist, and its moves connect neighbours.

A searcher measures each schedule at most once, resumes as if it had never ended, and follows its
paper.
"""
