//! Says what happened when a mapped file can no longer be read.
//!
//! A file that is cut short under its mapping, or a disk that fails, makes the next touch of
//! a lost page raise SIGBUS. No error value can come of that: the touch is a plain load in
//! the middle of a product. What can be promised is that nothing wrong is computed and that
//! the process says why it ends. `--memory resident` and `--memory stream` read instead of
//! touching, and report such faults as ordinary errors.
#![allow(unsafe_code)] // a signal handler is installed through the C interface

/// What the handler writes: nothing may be formatted or allocated there.
const MESSAGE: &[u8] = b"error: a mapped file of the container can no longer be read: it became \
shorter, or its disk failed\nhint: check the container with `k3-prep verify`; --memory resident \
reads it once at start\n";

/// Ends the process with a message and exit code 2 when SIGBUS is raised.
#[cfg(target_os = "linux")]
pub(crate) fn install() {
    // SAFETY: all zeroes is a valid `sigaction` (no flags, an empty mask); the handler has
    // the signature of one without SA_SIGINFO and does only what a handler may do.
    unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = end as extern "C" fn(libc::c_int) as usize;
        // A refusal leaves the default, which ends the process without a word.
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut());
    }
}

/// Elsewhere SIGBUS also means a stack overflow, which the standard library reports.
#[cfg(not(target_os = "linux"))]
pub(crate) fn install() {}

#[cfg(target_os = "linux")]
extern "C" fn end(_: libc::c_int) {
    // SAFETY: `write` and `_exit` are async-signal-safe, and the message is static.
    unsafe {
        libc::write(libc::STDERR_FILENO, MESSAGE.as_ptr().cast(), MESSAGE.len());
        libc::_exit(2);
    }
}
