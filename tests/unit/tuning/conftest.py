"""Promise: a space holds exactly the schedules that exist, and its moves connect neighbours.

A searcher measures each schedule at most once, resumes without a difference, and follows its paper.
"""
