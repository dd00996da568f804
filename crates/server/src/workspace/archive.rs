//! A workspace as a tar.gz archive that is made while it is sent.

use std::{
    fs::File,
    io::{self, Write},
    os::fd::{AsFd, OwnedFd},
    path::{Path, PathBuf},
};

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use oubliette_protocol::Result;
use rustix::fs::{AtFlags, Dir, FileType, Mode, OFlags};
use tokio::sync::mpsc;

use super::files;

/// Maximum depth of folders; deeper ones are left out.
const MAX_DEPTH: usize = 200;
/// Size of a sent chunk in bytes.
const CHUNK_BYTES: usize = 64 * 1024;

/// Packs a workspace on a blocking thread; the returned channel yields the archive in chunks, as fast as they are
/// read. An error ends the stream early, which gzip readers detect.
pub(crate) fn pack(workspace: &Path) -> Result<mpsc::Receiver<io::Result<Bytes>>> {
    let root = files::open_root_for_reading(workspace)?;
    let (sender, receiver) = mpsc::channel(4);
    tokio::task::spawn_blocking(move || {
        let mut writer = ChunkWriter {
            sender: sender.clone(),
            buffer: Vec::with_capacity(CHUNK_BYTES),
        };
        let packed = (|| {
            let mut tar = tar::Builder::new(GzEncoder::new(&mut writer, Compression::fast()));
            tar.follow_symlinks(false);
            add_folder(&mut tar, &root, &PathBuf::new(), 0)?;
            tar.into_inner()?.finish()?.flush()
        })();
        if let Err(error) = packed {
            let _ = sender.blocking_send(Err(error));
        }
    });
    Ok(receiver)
}

/// Adds a folder's entries. Each is opened by name relative to its open parent and without following links, so a
/// running agent cannot redirect the walk out of the workspace.
fn add_folder<W: Write>(
    tar: &mut tar::Builder<W>,
    folder: &OwnedFd,
    path: &Path,
    depth: usize,
) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Ok(());
    }
    let mut names = Vec::new();
    for entry in Dir::read_from(folder)? {
        let entry = entry?;
        if !matches!(entry.file_name().to_bytes(), b"." | b"..") {
            names.push(entry.file_name().to_owned());
        }
    }
    names.sort();
    for name in names {
        let Ok(stat) = rustix::fs::statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW) else {
            continue;
        };
        let inner = path.join(std::ffi::OsStr::new(&*name.to_string_lossy()));
        let mut header = tar::Header::new_gnu();
        header.set_mode(stat.st_mode & 0o777);
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header.set_size(0);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let Ok(opened) = open(folder, &name, OFlags::DIRECTORY) else {
                    continue;
                };
                header.set_entry_type(tar::EntryType::Directory);
                tar.append_data(&mut header, &inner, io::empty())?;
                add_folder(tar, &opened, &inner, depth + 1)?;
            }
            FileType::RegularFile => {
                let Ok(opened) = open(folder, &name, OFlags::NONBLOCK) else {
                    continue;
                };
                let size = u64::try_from(rustix::fs::fstat(&opened)?.st_size).unwrap_or(0);
                header.set_entry_type(tar::EntryType::Regular);
                header.set_size(size);
                // Padded with zeros, since a file that shrinks meanwhile must still have the size in its header.
                let content = io::Read::chain(File::from(opened), io::repeat(0));
                tar.append_data(&mut header, &inner, io::Read::take(content, size))?;
            }
            FileType::Symlink => {
                let Ok(target) = rustix::fs::readlinkat(folder, &name, Vec::new()) else {
                    continue;
                };
                header.set_entry_type(tar::EntryType::Symlink);
                tar.append_link(&mut header, &inner, &*target.to_string_lossy())?;
            }
            _ => {}
        }
    }
    Ok(())
}

fn open(folder: impl AsFd, name: &std::ffi::CStr, flags: OFlags) -> rustix::io::Result<OwnedFd> {
    rustix::fs::openat(
        folder,
        name,
        flags | OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC,
        Mode::empty(),
    )
}

/// A writer that sends what is written in chunks of [`CHUNK_BYTES`]; it fails when the receiver is dropped.
struct ChunkWriter {
    sender: mpsc::Sender<io::Result<Bytes>>,
    buffer: Vec<u8>,
}

impl ChunkWriter {
    fn send(&mut self) -> io::Result<()> {
        if self.buffer.is_empty() {
            return Ok(());
        }
        let chunk = std::mem::replace(&mut self.buffer, Vec::with_capacity(CHUNK_BYTES));
        self.sender
            .blocking_send(Ok(chunk.into()))
            .map_err(|_| io::ErrorKind::BrokenPipe.into())
    }
}

impl Write for ChunkWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffer.extend_from_slice(bytes);
        if self.buffer.len() >= CHUNK_BYTES {
            self.send()?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.send()
    }
}

#[cfg(test)]
mod tests {
    use std::{io::Read as _, os::unix::fs::symlink};

    use super::*;

    #[tokio::test]
    async fn a_workspace_is_packed_with_links_as_links() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir(dir.path().join("d")).unwrap();
        std::fs::write(dir.path().join("d/f"), "x".repeat(200_000)).unwrap();
        symlink("/etc/passwd", dir.path().join("l")).unwrap();
        let mut chunks = pack(dir.path()).unwrap();
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.recv().await {
            bytes.extend_from_slice(&chunk.unwrap());
        }
        let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(&bytes[..]));
        let mut seen = Vec::new();
        for entry in tar.entries().unwrap() {
            let mut entry = entry.unwrap();
            let mut text = String::new();
            entry.read_to_string(&mut text).unwrap();
            seen.push((
                entry.path().unwrap().display().to_string(),
                entry.header().entry_type(),
                text.len(),
            ));
        }
        assert_eq!(
            seen,
            [
                ("d".to_owned(), tar::EntryType::Directory, 0),
                ("d/f".to_owned(), tar::EntryType::Regular, 200_000),
                ("l".to_owned(), tar::EntryType::Symlink, 0),
            ]
        );
    }
}
