//! A workspace whose names and links are arbitrary, packed as an archive.

use std::{
    ffi::OsStr,
    os::unix::{ffi::OsStrExt, fs::symlink},
};

/// Entries of one input that are made.
const MOST_ENTRIES: usize = 16;

/// The input, a line each: `l<name>/<target>` a link, `d<name>` a directory, anything else a file of that name whose
/// content is its name. Names that cannot be made are left out.
pub fn run(bytes: &[u8]) {
    // In memory where that is possible: thousands are made.
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    let folder = folder.expect("a directory");
    for line in bytes.split(|byte| *byte == b'\n').take(MOST_ENTRIES) {
        let Some((kind, rest)) = line.split_first() else {
            continue;
        };
        let (name, target) = match rest.iter().position(|byte| *byte == b'/') {
            Some(at) => (&rest[..at], &rest[at + 1..]),
            None => (rest, &b"target"[..]),
        };
        if name.is_empty() || name == b"." || name == b".." || name.contains(&0) {
            continue;
        }
        let path = folder.path().join(OsStr::from_bytes(name));
        let _ = match kind {
            b'l' => symlink(OsStr::from_bytes(target), path),
            b'd' => std::fs::create_dir(path),
            // Not over a link that is there, which leads elsewhere.
            _ => std::fs::File::create_new(path)
                .and_then(|mut file| std::io::Write::write_all(&mut file, name)),
        };
    }
    oubliette_server::testing::fuzzing::fuzz_archive(folder.path());
}
