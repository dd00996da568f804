//! A fuzz target under libFuzzer, guided by coverage. `OUBLIETTE_FUZZ_TARGET` names it; `cargo xtask fuzz` builds and runs
//! this with the compiler's coverage instrumentation.
#![no_main]

use std::sync::OnceLock;

use libfuzzer_sys::fuzz_target;

static RUN: OnceLock<fn(&[u8])> = OnceLock::new();

fuzz_target!(
    init: {
        provide_signal_stack();
    },
    |bytes: &[u8]| {
        let run = RUN.get_or_init(|| {
            let name = std::env::var("OUBLIETTE_FUZZ_TARGET").unwrap_or_default();
            let target = oubliette_fuzz::find(&name);
            target.unwrap_or_else(|| panic!("OUBLIETTE_FUZZ_TARGET={name}: no such target")).run
        });
        run(bytes);
    }
);

/// Gives the main thread a second stack for signal handlers, so that libFuzzer's can save the input of a stack overflow.
/// Rust's own start-up code, which does this for a `main` in Rust, does not run here.
fn provide_signal_stack() {
    let memory = Vec::leak(vec![0_u8; 256 * 1024]);
    let stack = libc::stack_t {
        ss_sp: memory.as_mut_ptr().cast(),
        ss_flags: 0,
        ss_size: memory.len(),
    };
    // SAFETY: the memory is never freed and used for nothing else; the action is the default one, whose flag libFuzzer
    // keeps when it installs its handler after this.
    let failed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = libc::SIG_DFL;
        action.sa_flags = libc::SA_ONSTACK;
        libc::sigaltstack(&stack, std::ptr::null_mut())
            | libc::sigaction(libc::SIGSEGV, &action, std::ptr::null_mut())
            | libc::sigaction(libc::SIGBUS, &action, std::ptr::null_mut())
    };
    assert_eq!(failed, 0, "no stack for signal handlers");
}
