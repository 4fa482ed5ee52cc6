"""Processes and sockets of a server.

workers      several processes that share a port, and their supervisor
server       one process: uvicorn with this server's limits and shutdown
open_files   limits that the limit of open files allows
sockets      the port, which refuses connections until the server can answer them, and the Unix
             socket through which the owner's jobs reach the server
tls          certificates
telemetry    the tracer of a process
"""

__all__: list[str] = []
