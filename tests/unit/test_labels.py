"""A label names a line of the user, and leaves the user's objects alone."""

import gc
import threading
import weakref

from graphstash.hooks.labels import main_thread_line


class Tensor:
    pass


def test_line_of_the_main_thread_keeps_no_variable_of_its_callers():
    def call():
        tensor = Tensor()
        return main_thread_line(), weakref.ref(tensor)

    gc.disable()  # it would end the tensor even if a cycle of frames kept it
    try:
        line, tensor = call()
        assert tensor() is None
    finally:
        gc.enable()
    assert line.startswith("test_labels.py:")
    assert line.endswith(" in call")


def test_line_of_the_main_thread_is_read_from_any_thread():
    lines = []
    thread = threading.Thread(target=lambda: lines.append(main_thread_line()))
    thread.start()
    thread.join()
    assert lines[0].startswith("test_labels.py:")
    assert lines[0].endswith(" in test_line_of_the_main_thread_is_read_from_any_thread")
