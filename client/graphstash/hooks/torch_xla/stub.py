"""The native half of the gate: machine code that replaces `stat`, and the variables it uses.

torch_xla looks for a cached executable while it holds the mutex of its cache. Python code there
would need the interpreter lock. Another thread may hold that lock while it waits for the mutex: a
deadlock. Therefore machine code replaces `stat`. It sends the path to the threads of `answering`
and waits only while they keep replying. In C:

    int gate(int version, const char *path, struct stat *buffer) {
        int rc = real(version, path, buffer);
        if (rc == 0 || !path || !starts_with(path, prefix)) return rc;
        if (!try_lock(&busy)) { ++give_ups; return rc; }
        if (!enabled || getpid() != owner) { busy = 0; return rc; }
        send(socket, {++sequence, path});                  // one datagram; failure: give up
        do {                                               // every reply restarts the timeout
            if (!readable_within(socket, patience)) { ++give_ups; busy = 0; return rc; }
            recv(socket, {&reply, &verdict});
        } while (reply != sequence || verdict != 'd');
        busy = 0;
        return real(version, path, buffer);
    }

The code calls the kernel directly. It waits for no lock, allocates nothing and preserves the
`errno` of `real`. Its page is never writable while it can run. To change the code, edit the right
column of `LISTING` and copy the left column from the assembler. The test prints the difference.
"""

import ctypes
import mmap
from typing import Final

from graphstash.hooks.torch_xla.elf import PAGE, map_pages, protect

__all__ = ["LISTING", "PATH_LIMIT", "Block", "Stub"]

PATH_LIMIT: Final = 4096  # PATH_MAX of <linux/limits.h>


class Block(ctypes.Structure):
    """The variables of the stub, in memory that follows its code.

    Python writes the configuration before it sets `enabled`. While `busy` is 1, the native code may
    use every field and the socket.
    """

    _fields_ = (
        ("real", ctypes.c_uint64),  # address of the function that the stub replaces
        ("patience_seconds", ctypes.c_int64),  # a struct timespec: timeout between two replies
        ("patience_nanoseconds", ctypes.c_int64),
        ("enabled", ctypes.c_uint32),
        ("owner", ctypes.c_int32),  # process whose threads answer; other processes send no request
        ("socket", ctypes.c_int32),
        ("busy", ctypes.c_uint32),  # 1 during an exchange; there is at most one at a time
        ("sequence", ctypes.c_uint32),  # number of the current or last request
        ("give_ups", ctypes.c_uint32),
        ("reply", ctypes.c_uint32),  # the last reply: the number of its request ...
        ("verdict", ctypes.c_char * 4),  # ... and b"w" (keep waiting) or b"d" (done)
        ("prefix_length", ctypes.c_uint32),
        ("prefix", ctypes.c_char * PATH_LIMIT),
        ("request", ctypes.c_char * (4 + PATH_LIMIT)),
    )


# Machine code and its assembly source (GNU as, Intel syntax). Names in capitals are the offsets of
# the fields of `Block`.
LISTING: Final = (
    ("", "gate:"),  # int gate(int version, const char *path, struct stat *buffer)
    ("55", "push rbp"),  # edi = version, rsi = path, rdx = buffer
    ("48 89 e5", "mov rbp, rsp"),
    ("53", "push rbx"),
    ("41 54", "push r12"),
    ("41 55", "push r13"),
    ("41 56", "push r14"),
    ("41 57", "push r15"),
    ("48 83 ec 28", "sub rsp, 40"),  # aligns the stack to 16 bytes, as the ABI requires at calls
    ("48 8d 1d e8 0f 00 00", "lea rbx, [rip + gate + PAGE]"),  # rbx = the block, on the next page
    ("41 89 fc", "mov r12d, edi"),
    ("49 89 f5", "mov r13, rsi"),
    ("49 89 d6", "mov r14, rdx"),
    ("ff 13", "call [rbx + REAL]"),
    ("41 89 c7", "mov r15d, eax"),  # r15 = the return value
    ("85 c0", "test eax, eax"),
    ("0f 84 3a 01 00 00", "je out"),  # the file exists, so no request is necessary
    ("4d 85 ed", "test r13, r13"),
    ("0f 84 31 01 00 00", "je out"),  # stat(NULL): `real` has set EFAULT
    ("4c 89 ee", "mov rsi, r13"),
    ("48 8d 7b 3c", "lea rdi, [rbx + PREFIX]"),
    ("8b 4b 38", "mov ecx, [rbx + PREFIX_LENGTH]"),
    ("f3 a6", "repe cmpsb"),  # stops at the first difference, so never reads past the path's NUL
    ("0f 85 1f 01 00 00", "jne out"),  # a path outside the prefix
    ("31 c0", "xor eax, eax"),
    ("b9 01 00 00 00", "mov ecx, 1"),
    ("f0 0f b1 4b 24", "lock cmpxchg [rbx + BUSY], ecx"),  # allows one exchange at a time
    ("0f 85 09 01 00 00", "jne busy"),
    ("83 7b 18 00", "cmp dword ptr [rbx + ENABLED], 0"),
    ("0f 84 f6 00 00 00", "je release"),
    ("b8 27 00 00 00", "mov eax, 39"),  # getpid
    ("0f 05", "syscall"),
    ("3b 43 1c", "cmp eax, [rbx + OWNER]"),
    ("0f 85 e6 00 00 00", "jne release"),  # a forked child without answering threads
    ("ff 43 28", "inc dword ptr [rbx + SEQUENCE]"),
    ("8b 43 28", "mov eax, [rbx + SEQUENCE]"),
    ("48 8d bb 3c 10 00 00", "lea rdi, [rbx + REQUEST]"),
    ("ab", "stosd"),  # the request: the sequence number ...
    ("4c 89 ee", "mov rsi, r13"),
    ("b9 00 10 00 00", "mov ecx, PATH_LIMIT"),
    ("", "copy:"),
    ("ac", "lodsb"),
    ("84 c0", "test al, al"),
    ("74 0a", "je send"),
    ("aa", "stosb"),  # ... and the path without its NUL
    ("ff c9", "dec ecx"),
    ("75 f6", "jne copy"),
    ("e9 bd 00 00 00", "jmp give_up"),  # longer than PATH_MAX
    ("", "send:"),
    ("48 8d b3 3c 10 00 00", "lea rsi, [rbx + REQUEST]"),
    ("48 89 fa", "mov rdx, rdi"),
    ("48 29 f2", "sub rdx, rsi"),
    ("8b 7b 20", "mov edi, [rbx + SOCKET]"),
    ("41 ba 40 40 00 00", "mov r10d, 0x4040"),  # MSG_NOSIGNAL | MSG_DONTWAIT
    ("45 31 c0", "xor r8d, r8d"),
    ("45 31 c9", "xor r9d, r9d"),
    ("b8 2c 00 00 00", "mov eax, 44"),  # sendto
    ("0f 05", "syscall"),
    ("48 85 c0", "test rax, rax"),
    ("0f 88 91 00 00 00", "js give_up"),
    ("", "await:"),  # sets the full timeout: after the request, and after every reply
    ("48 8b 43 08", "mov rax, [rbx + PATIENCE_SECONDS]"),
    ("48 89 44 24 10", "mov [rsp + 16], rax"),
    ("48 8b 43 10", "mov rax, [rbx + PATIENCE_NANOSECONDS]"),
    ("48 89 44 24 18", "mov [rsp + 24], rax"),
    ("", "poll:"),
    ("8b 43 20", "mov eax, [rbx + SOCKET]"),
    ("89 04 24", "mov [rsp], eax"),
    ("c7 44 24 04 01 00 00 00", "mov dword ptr [rsp + 4], 1"),  # POLLIN
    ("48 89 e7", "mov rdi, rsp"),
    ("be 01 00 00 00", "mov esi, 1"),
    ("48 8d 54 24 10", "lea rdx, [rsp + 16]"),  # the kernel writes the remaining time here ...
    ("45 31 d2", "xor r10d, r10d"),
    ("41 b8 08 00 00 00", "mov r8d, 8"),
    ("b8 0f 01 00 00", "mov eax, 271"),  # ppoll
    ("0f 05", "syscall"),
    ("83 f8 fc", "cmp eax, -4"),  # ... so after EINTR (-4), only the rest of the wait remains
    ("74 d0", "je poll"),
    ("83 f8 01", "cmp eax, 1"),
    ("75 4a", "jne give_up"),
    ("8b 3c 24", "mov edi, [rsp]"),
    ("48 8d 73 30", "lea rsi, [rbx + REPLY]"),
    ("ba 08 00 00 00", "mov edx, 8"),
    ("41 ba 40 00 00 00", "mov r10d, 0x40"),  # MSG_DONTWAIT
    ("45 31 c0", "xor r8d, r8d"),
    ("45 31 c9", "xor r9d, r9d"),
    ("b8 2d 00 00 00", "mov eax, 45"),  # recvfrom
    ("0f 05", "syscall"),
    ("48 83 f8 05", "cmp rax, 5"),
    ("75 25", "jne give_up"),  # 0: the other end is closed
    ("8b 43 30", "mov eax, [rbx + REPLY]"),
    ("3b 43 28", "cmp eax, [rbx + SEQUENCE]"),
    ("75 8c", "jne await"),  # a late reply to an earlier request
    ("80 7b 34 64", "cmp byte ptr [rbx + VERDICT], 0x64"),  # 'd', done
    ("75 86", "jne await"),
    ("c7 43 24 00 00 00 00", "mov dword ptr [rbx + BUSY], 0"),
    ("44 89 e7", "mov edi, r12d"),
    ("4c 89 ee", "mov rsi, r13"),
    ("4c 89 f2", "mov rdx, r14"),
    ("ff 13", "call [rbx + REAL]"),  # repeats the look-up: the file may exist now
    ("41 89 c7", "mov r15d, eax"),
    ("eb 11", "jmp out"),
    ("", "give_up:"),
    ("f0 ff 43 2c", "lock inc dword ptr [rbx + GIVE_UPS]"),
    ("", "release:"),
    ("c7 43 24 00 00 00 00", "mov dword ptr [rbx + BUSY], 0"),
    ("eb 04", "jmp out"),
    ("", "busy:"),
    ("f0 ff 43 2c", "lock inc dword ptr [rbx + GIVE_UPS]"),
    ("", "out:"),
    ("44 89 f8", "mov eax, r15d"),
    ("48 83 c4 28", "add rsp, 40"),
    ("41 5f", "pop r15"),
    ("41 5e", "pop r14"),
    ("41 5d", "pop r13"),
    ("41 5c", "pop r12"),
    ("5b", "pop rbx"),
    ("5d", "pop rbp"),
    ("c3", "ret"),
)


class Stub:
    """One copy of the code, and its block. Both stay mapped: a thread may be executing the code.

    Attributes:
        address: Address of the function.
        block: Variables of the function.
    """

    def __init__(self, *, real: int, prefix: bytes, patience_seconds: float) -> None:
        """Map the pages and fill the block. The stub only calls `real` until it is enabled.

        Raises:
            GateUnavailable: The kernel refuses the memory, or refuses to make it executable.
        """
        code = bytes.fromhex("".join(line for line, _ in LISTING))
        self.address = map_pages(1 + -(-ctypes.sizeof(Block) // PAGE))
        ctypes.memmove(self.address, code, len(code))
        protect(self.address, mmap.PROT_READ | mmap.PROT_EXEC)
        self.block = Block.from_address(self.address + PAGE)
        self.block.real = real
        seconds, rest = divmod(patience_seconds, 1.0)
        self.block.patience_seconds = int(seconds)
        self.block.patience_nanoseconds = int(rest * 1e9)
        self.block.prefix = prefix
        self.block.prefix_length = len(prefix)
