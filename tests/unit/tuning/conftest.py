"""A space holds exactly the schedules that exist, and says which lie next to each other. A searcher
measures each schedule at most once, resumes as if it had never ended, and does what its paper says.
"""
