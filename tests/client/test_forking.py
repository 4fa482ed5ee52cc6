"""A connection that a thread is about to make when another one forks."""

from support.processes import python


def test_child_forked_during_a_request_gets_its_own_connection():
    program = """
import os, signal, ssl, threading
from graphstash._http.deadline import ProcessClient

making, forking = threading.Event(), threading.Event()

def context():
    if not making.is_set():
        making.set()
        forking.wait(60)
    return ssl.create_default_context()

client = ProcessClient("https://127.0.0.1:9", context=context)
os.register_at_fork(before=forking.set)
thread = threading.Thread(target=client.connected)
thread.start()
making.wait(60)
if (child := os.fork()) == 0:
    signal.alarm(30)  # it would never end
    client.connected()
    os._exit(0)
print(os.waitpid(child, 0)[1])
thread.join()
"""
    assert python(program, check=True).stdout == "0\n"
