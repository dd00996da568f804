//! Reads a tar.gz whose maker is not trusted: every entry is checked, and names, counts and sizes are bounded before
//! anything is kept in memory.

use std::io::Read;

use oubliette_protocol::{Error, Result, id::quoted};

use crate::workspace::files::WorkspacePath;

/// Maximum length of a name or of a link's target, in bytes.
const MAX_NAME_BYTES: u64 = 4096;

/// Headers that an entry may have: one with its name, one with its target, its own.
const HEADERS_PER_ENTRY: u64 = 3;

/// How much is read after the last entry, in bytes.
const MAX_PADDING_BYTES: u64 = 1 << 20;

/// How much an archive may hold.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ArchiveLimits {
    /// Maximum number of entries.
    pub(crate) entries: u64,
    /// Maximum size of all files together, in bytes.
    pub(crate) bytes: u64,
}

/// What an archive holds.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ArchiveTotals {
    /// Number of entries.
    pub(crate) entries: u64,
    /// Number of files.
    pub(crate) files: u64,
    /// Size of all files together, in bytes.
    pub(crate) bytes: u64,
}

/// What an entry is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ArchiveEntryKind {
    /// A file.
    File,
    /// A folder.
    Folder,
    /// A symbolic link with this target.
    Link(String),
}

/// One entry of an archive.
pub(crate) struct ArchiveEntry<'a> {
    /// Where it belongs, below the root.
    pub(crate) path: WorkspacePath,
    /// What it is.
    pub(crate) kind: ArchiveEntryKind,
    /// Its permissions, without set-id bits.
    pub(crate) mode: u32,
    /// A file's content.
    pub(crate) content: &'a mut dyn Read,
}

/// Reads an archive and passes each entry to `each`. Fails at the first entry that is not a file, folder or link with a
/// name below the root, and past the limits.
pub(crate) fn read_archive(
    source: impl Read,
    limits: ArchiveLimits,
    mut each: impl FnMut(ArchiveEntry<'_>) -> Result<()>,
) -> Result<ArchiveTotals> {
    let mut archive = tar::Archive::new(flate2::read::GzDecoder::new(source));
    // Raw: the library would read a long name whole, however long it is.
    let entries = archive.entries().map_err(unreadable)?.raw(true);
    let (mut long_name, mut long_target) = (None, None);
    let mut totals = ArchiveTotals::default();
    let too_many = || {
        let most = limits.entries;
        Error::limit_exceeded(format!("the archive has more than {most} entries"))
    };
    // Every header counts: a few megabytes of gzip can be any number of names that nothing follows.
    for (number, entry) in (1..).zip(entries) {
        let mut entry = entry.map_err(unreadable)?;
        if number > limits.entries.saturating_mul(HEADERS_PER_ENTRY) {
            return Err(too_many());
        }
        let size = entry.header().entry_size().map_err(unreadable)?;
        let kind = entry.header().entry_type();
        if kind.is_gnu_longname() {
            long_name = Some(read_name(&mut entry, size)?);
            continue;
        }
        if kind.is_gnu_longlink() {
            long_target = Some(read_name(&mut entry, size)?);
            continue;
        }
        let name = match long_name.take() {
            Some(name) => name,
            None => text(&entry.header().path_bytes())?,
        };
        let target = long_target.take();
        let kind = if kind.is_file() {
            ArchiveEntryKind::File
        } else if kind.is_dir() {
            ArchiveEntryKind::Folder
        } else if kind.is_symlink() {
            match (target, entry.header().link_name_bytes()) {
                (Some(target), _) => ArchiveEntryKind::Link(target),
                (None, Some(target)) => ArchiveEntryKind::Link(text(&target)?),
                (None, None) => return Err(bad(&name, "is a link without a target")),
            }
        } else {
            return Err(bad(
                &name,
                "is not a file, folder or symbolic link in GNU format (tar --format=gnu)",
            ));
        };
        let path = WorkspacePath::parse(&name)?;
        totals.entries += 1;
        match kind {
            ArchiveEntryKind::File => {
                totals.files += 1;
                totals.bytes = totals.bytes.saturating_add(size);
            }
            // What follows its header would be unpacked to be skipped, however much it is.
            ArchiveEntryKind::Folder | ArchiveEntryKind::Link(_) if size > 0 => {
                return Err(bad(&name, "has a content and is no file"));
            }
            ArchiveEntryKind::Folder | ArchiveEntryKind::Link(_) => {}
        }
        if totals.entries > limits.entries {
            return Err(too_many());
        }
        if totals.bytes > limits.bytes {
            let most = limits.bytes >> 20;
            return Err(Error::limit_exceeded(format!(
                "the archive holds more than {most} MiB"
            )));
        }
        let mode = entry.header().mode().map_err(unreadable)? & 0o777;
        each(ArchiveEntry {
            path,
            kind,
            mode,
            content: &mut entry,
        })?;
    }
    // To the end of the compressed data, where its checksum is: an archive that was cut off is not taken for a whole one.
    let mut rest = archive.into_inner().take(MAX_PADDING_BYTES);
    std::io::copy(&mut rest, &mut std::io::sink()).map_err(unreadable)?;
    Ok(totals)
}

/// Reads the name that an entry holds for the next one.
fn read_name(entry: &mut impl Read, size: u64) -> Result<String> {
    if size > MAX_NAME_BYTES + 1 {
        return Err(Error::invalid(format!(
            "a name in the archive is longer than {MAX_NAME_BYTES} bytes"
        )));
    }
    let mut name = Vec::new();
    entry.take(size).read_to_end(&mut name).map_err(unreadable)?;
    let end = name.iter().position(|b| *b == 0).unwrap_or(name.len());
    text(&name[..end])
}

fn text(name: &[u8]) -> Result<String> {
    match std::str::from_utf8(name) {
        Ok(name) => Ok(name.to_owned()),
        Err(_) => Err(bad(&String::from_utf8_lossy(name), "is not named in UTF-8")),
    }
}

fn bad(name: &str, why: &str) -> Error {
    Error::invalid(format!("{} in the archive {why}", quoted(name)))
}

fn unreadable(error: std::io::Error) -> Error {
    Error::invalid(format!("the archive is not a whole tar.gz: {error}"))
}

/// Whether a symbolic link at `path` leads nowhere but below the root, by its text alone. The folders above it are real
/// ones; any other name in its target may be a link, so that a `..` after it would lead to another place than the text
/// says. Links that all pass this lead nowhere else together either.
pub(crate) fn stays_inside(path: &WorkspacePath, target: &str) -> bool {
    if target.is_empty() || target.starts_with('/') || target.contains('\0') {
        return false;
    }
    let mut depth = path.parents();
    let mut is_below_a_name = false;
    for part in target.split('/') {
        match part {
            "" | "." => {}
            ".." if depth == 0 || is_below_a_name => return false,
            ".." => depth -= 1,
            _ => is_below_a_name = true,
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;

    const LIMITS: ArchiveLimits = ArchiveLimits {
        entries: 10,
        bytes: 1000,
    };

    /// An archive of files with these names and contents, written as they are.
    fn archive(files: &[(&[u8], &[u8])]) -> Vec<u8> {
        let gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        let mut tar = tar::Builder::new(gz);
        for (name, content) in files {
            let mut header = tar::Header::new_gnu();
            header.set_size(content.len() as u64);
            header.set_mode(0o4755);
            header.as_mut_bytes()[..name.len()].copy_from_slice(name);
            header.set_cksum();
            tar.append(&header, *content).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap()
    }

    fn read(bytes: &[u8]) -> Result<Vec<(String, u32, String)>> {
        let mut found = Vec::new();
        read_archive(bytes, LIMITS, |entry| {
            let mut text = String::new();
            entry.content.read_to_string(&mut text).unwrap();
            found.push((entry.path.to_string(), entry.mode, text));
            Ok(())
        })?;
        Ok(found)
    }

    #[test]
    fn entries_come_with_their_modes_and_without_set_id_bits() {
        let found = read(&archive(&[(b"a/b", b"hi"), (b"c", b"")])).unwrap();
        assert_eq!(found[0], ("a/b".into(), 0o755, "hi".into()));
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn what_leads_out_is_too_large_or_cut_off_is_refused() {
        assert!(read(&archive(&[(b"../x", b"")])).is_err());
        assert!(read(&archive(&[(b"a/../../x", b"")])).is_err());
        assert!(read(&archive(&[(b"\xff", b"")])).is_err());
        assert!(read(&archive(&[(b"a", &[0; 1001])])).is_err());
        let many: Vec<(&[u8], &[u8])> = vec![(b"a", b""); 11];
        assert!(read(&archive(&many)).is_err());
        let whole = archive(&[(b"a", &[7; 900])]);
        assert!(read(&whole[..whole.len() / 2]).is_err());
        assert!(read(b"no archive").is_err());
    }

    #[test]
    fn a_long_name_is_read_and_a_very_long_one_refused() {
        let named = |length: usize| {
            let gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
            let mut tar = tar::Builder::new(gz);
            let mut header = tar::Header::new_gnu();
            header.set_size(0);
            header.set_mode(0o644);
            let path = vec!["d".repeat(100); length].join("/");
            tar.append_data(&mut header, path, &[][..]).unwrap();
            read(&tar.into_inner().unwrap().finish().unwrap())
        };
        assert_eq!(named(3).unwrap()[0].0.len(), 302);
        assert!(named(100).is_err());
    }

    /// An archive of one header after the other, each with this many zeros after it.
    fn headers(count: usize, kind: tar::EntryType, size: u64) -> Vec<u8> {
        let gz = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        let mut tar = tar::Builder::new(gz);
        for _ in 0..count {
            let mut header = tar::Header::new_gnu();
            header.set_path("a").unwrap();
            header.set_entry_type(kind);
            header.set_size(size);
            header.set_mode(0o644);
            header.set_link_name("b").unwrap();
            header.set_cksum();
            tar.append(&header, std::io::repeat(0).take(size)).unwrap();
        }
        tar.into_inner().unwrap().finish().unwrap()
    }

    /// Counts what is read of it.
    struct Counted<R>(R, std::rc::Rc<std::cell::Cell<usize>>);

    impl<R: Read> Read for Counted<R> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let read = self.0.read(buffer)?;
            self.1.set(self.1.get() + read);
            Ok(read)
        }
    }

    #[test]
    fn names_without_entries_and_content_of_links_are_not_read_to_their_end() {
        use tar::EntryType::{Directory, GNULongLink, GNULongName, Symlink};
        for (archive, kind) in [
            (headers(20_000, GNULongName, 1), GNULongName),
            (headers(20_000, GNULongLink, 1), GNULongLink),
            (headers(1, Symlink, 64 << 20), Symlink),
            (headers(1, Directory, 64 << 20), Directory),
        ] {
            let read = std::rc::Rc::new(std::cell::Cell::new(0));
            let source = Counted(&archive[..], read.clone());
            assert!(read_archive(source, LIMITS, |_| Ok(())).is_err(), "{kind:?}");
            let (read, all) = (read.get(), archive.len());
            assert!(read <= 64 << 10 && read < all, "{kind:?}: {read} of {all} bytes");
        }
    }

    #[test]
    fn links_that_lead_out_are_told_from_those_that_stay() {
        let path = WorkspacePath::parse("a/b/link").unwrap();
        for inside in ["c", "../c", "../../c", "./.././x//y"] {
            assert!(stays_inside(&path, inside), "{inside}");
        }
        for outside in ["", "/etc/passwd", "../../../c", "x/../../../../c", "x/../y"] {
            assert!(!stays_inside(&path, outside), "{outside}");
        }
    }
}
