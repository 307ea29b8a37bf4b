"""The system calls that a generated program may make, as a seccomp filter."""

import errno
import fcntl
import os
import tempfile
import termios
from functools import cache

from upcycle_core.errors import Fault, InputError

# What the standard library asks of the kernel, on any architecture. Not among them: whatever makes
# a process, a socket, a signal or memory outside RLIMIT_AS, looks into another process, or changes
# a file that was not opened for writing. Landlock does not judge modes, owners, times and locks, so
# chmod and its like must not be here; truncate it sees since Linux 6.2 only.
ALLOWED = """
read readv pread64 preadv write writev pwrite64 pwritev lseek close close_range dup dup2 dup3
pipe pipe2 poll ppoll select pselect6 epoll_create epoll_create1 epoll_ctl epoll_wait epoll_pwait
eventfd2 stat fstat lstat newfstatat statx access faccessat faccessat2 readlink readlinkat
statfs fstatfs getcwd chdir fchdir getdents getdents64 fsync fdatasync ftruncate unlink unlinkat
rename renameat renameat2 umask sendfile fadvise64
mmap mremap munmap mprotect madvise mincore msync brk membarrier
rt_sigaction rt_sigprocmask rt_sigreturn rt_sigpending rt_sigsuspend rt_sigtimedwait sigaltstack
pause restart_syscall alarm setitimer getitimer
futex futex_waitv set_robust_list get_robust_list set_tid_address rseq arch_prctl sched_yield
sched_getaffinity sched_getparam sched_getscheduler sched_get_priority_max sched_get_priority_min
getpid gettid getppid getuid geteuid getgid getegid getresuid getresgid getgroups getpgrp getpgid
getsid getpriority uname sysinfo times getrusage getrlimit getcpu getrandom
clock_gettime clock_getres clock_nanosleep nanosleep gettimeofday time exit exit_group
"""
FCNTL = ("F_DUPFD", "F_DUPFD_CLOEXEC", "F_GETFD", "F_SETFD", "F_GETFL", "F_SETFL")
IOCTL = ("TCGETS", "TIOCGWINSZ", "FIONREAD", "FIONBIO", "FIOCLEX", "FIONCLEX")
CLONE_THREAD = 0x00010000


@cache
def compiled_filter() -> bytes:
    """The filter for this machine's kernel: an array of ``struct sock_filter``.

    Raises:
        InputError: pyseccomp or libseccomp is missing.
    """
    try:
        import pyseccomp as seccomp
    except (ImportError, RuntimeError) as error:
        remedy = (
            f"missing ({error}): pip install pyseccomp, and libseccomp from the system's packages"
        )
        raise InputError(Fault("sandbox", "pyseccomp", remedy)) from error

    # EPERM rather than death: a program may try something, be refused and go on.
    rules = seccomp.SyscallFilter(seccomp.ERRNO(errno.EPERM))

    def allow(name: str, *arguments: seccomp.Arg) -> None:
        # A call that this architecture or libseccomp does not know stays forbidden.
        if seccomp.resolve_syscall(seccomp.Arch.NATIVE, name) != -1:
            rules.add_rule(seccomp.ALLOW, name, *arguments)

    def masked(index: int, mask: int, value: int) -> seccomp.Arg:
        return seccomp.Arg(index, seccomp.MASKED_EQ, mask, value)

    for name in ALLOWED.split():
        allow(name)
    for command in FCNTL:  # not F_SETOWN and F_SETSIG: they send signals
        allow("fcntl", seccomp.Arg(1, seccomp.EQ, getattr(fcntl, command)))
    for command in IOCTL:
        allow("ioctl", seccomp.Arg(1, seccomp.EQ, getattr(termios, command)))
    allow("prlimit64", seccomp.Arg(0, seccomp.EQ, 0))  # of itself
    # O_TRUNC without writing empties a file too. ``open`` is not allowed: the C library has openat.
    allow("openat", masked(2, os.O_ACCMODE | os.O_TRUNC, os.O_RDONLY))
    allow("openat", masked(2, os.O_ACCMODE, os.O_WRONLY))
    allow("openat", masked(2, os.O_ACCMODE, os.O_RDWR))
    allow("clone", masked(0, CLONE_THREAD, CLONE_THREAD))
    # The flags of clone3 lie in memory, where no filter sees them; told that the kernel does not
    # have it, the C library takes clone.
    rules.add_rule(seccomp.ERRNO(errno.ENOSYS), "clone3")
    with tempfile.TemporaryFile() as file:
        rules.export_bpf(file)
        file.seek(0)
        return file.read()
