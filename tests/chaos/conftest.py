"""Promise: a shared deployment loses nothing that it acknowledged, and leaves nothing over.

Random faults hit servers, databases, S3 and disks under mixed load. A model of the deployment
decides what is right.
"""
