//! Whether `oubliette-client`, the first process of a container, starts in any image.

use std::path::Path;

use crate::driver::SandboxCheck;

/// Whether `oubliette-client` can start in any image.
pub(crate) fn check(client: &Path) -> SandboxCheck {
    match is_static(client) {
        Ok(true) => SandboxCheck::passed("first process", format!("{}, static", client.display())),
        Ok(false) => SandboxCheck::passed(
            "first process",
            format!(
                "{}, linked to this machine's C library: it starts only in images that have the same or a later one; \
                 release builds are static",
                client.display()
            ),
        ),
        Err(error) => SandboxCheck::failed(
            "first process",
            format!("{}: {error}", client.display()),
            crate::host::REINSTALL,
        ),
    }
}

/// Whether a program is linked statically: an ELF file without an interpreter.
fn is_static(program: &Path) -> std::io::Result<bool> {
    use std::io::Read;
    const PT_INTERP: u32 = 3;
    let mut head = Vec::new();
    std::fs::File::open(program)?.take(4096).read_to_end(&mut head)?;
    let number = |at: usize, len: usize| {
        let bytes = head.get(at..at + len)?;
        Some(
            bytes
                .iter()
                .rev()
                .fold(0_u64, |sum, byte| sum << 8 | u64::from(*byte)),
        )
    };
    let interpreted = || {
        let (start, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
        (0..count).find_map(|n| {
            let at = usize::try_from(start + n * size).ok()?;
            (number(at, 4)? == u64::from(PT_INTERP)).then_some(())
        })
    };
    Ok(head.starts_with(b"\x7fELF") && interpreted().is_none())
}
