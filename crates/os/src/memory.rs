//! Settings of the C library's allocator.

/// From this size on, a buffer is a mapping of its own.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES: libc::c_int = 1024 * 1024;
/// Free memory at the end of a heap is returned from this size on: less would be asked for again at once.
#[cfg(target_env = "gnu")]
const TRIMMED_BYTES: libc::c_int = 4 * 1024 * 1024;

/// Has every buffer of 1 MiB or more returned to the kernel as soon as it is freed.
///
/// Otherwise glibc raises that size whenever such a buffer is freed, up to 32 MiB, and keeps what is freed below it:
/// a program whose large buffers are bounded could hold a multiple of that bound. Call it before the first thread
/// starts. Does nothing with other C libraries.
#[allow(unsafe_code)]
pub fn return_large_buffers() {
    #[cfg(target_env = "gnu")]
    // SAFETY: only sets two numbers of the allocator. It refuses one it does not like, and keeps its own.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIMMED_BYTES);
    }
}
