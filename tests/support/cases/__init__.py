"""Cases that run in processes of their own: see `support.run_case`."""
