//! Packs a workspace step by step, so that nothing is held while nobody reads the archive.

use std::{
    fs::File,
    io::{self, Read as _, Write as _},
    os::fd::OwnedFd,
    path::{Path, PathBuf},
};

use bytes::Bytes;
use flate2::{Compression, write::GzEncoder};
use rustix::fs::{AtFlags, FileType, OFlags};

use crate::open_folder::{OpenFolder, open_entry};

/// Maximum depth of folders; deeper ones are left out.
const MAX_DEPTH: usize = 200;
/// Size of a chunk of the archive, in bytes.
const CHUNK_BYTES: usize = 64 * 1024;
/// How much is read in one step, in bytes; an entry counts as some.
const STEP_BYTES: usize = 4 * 1024 * 1024;
/// What an entry counts as, for the system calls it takes.
const ENTRY_BYTES: usize = 4096;
/// Size of a block of a tar file.
const BLOCK_BYTES: u64 = 512;

/// A workspace being packed. Each entry is opened by name relative to its open parent and without following links,
/// so a running agent cannot redirect the walk out of the workspace.
pub(super) struct ArchivePacker {
    tar: tar::Builder<GzEncoder<Vec<u8>>>,
    /// The folders from the root to the one that is being packed.
    open: Vec<OpenFolder<PathBuf>>,
    file: Option<PackedFile>,
    buffer: Box<[u8]>,
}

/// A file of which the header is written.
struct PackedFile {
    file: File,
    left: u64,
    /// Zeros up to the next whole block.
    padding: u64,
}

/// What a step of packing came to.
pub(super) enum PackedStep {
    /// The next part of the archive; may be empty.
    Chunk(Bytes),
    /// The last part.
    Last(Bytes),
}

impl ArchivePacker {
    pub(super) fn new(root: OwnedFd) -> Self {
        let encoder = GzEncoder::new(Vec::with_capacity(2 * CHUNK_BYTES), Compression::fast());
        Self {
            tar: tar::Builder::new(encoder),
            open: vec![OpenFolder::new(root, PathBuf::new())],
            file: None,
            buffer: vec![0; 64 * 1024].into(),
        }
    }

    /// Packs until there is a chunk, for a bounded time.
    pub(super) fn step(&mut self) -> io::Result<PackedStep> {
        let mut left = STEP_BYTES;
        while left > 0 && self.tar.get_ref().get_ref().len() < CHUNK_BYTES {
            let read = match &mut self.file {
                Some(_) => self.pack_content()?,
                None => match self.pack_entry()? {
                    Some(()) => ENTRY_BYTES,
                    None => return self.finish(),
                },
            };
            left = left.saturating_sub(read.max(1));
        }
        let chunk = std::mem::replace(self.tar.get_mut().get_mut(), Vec::with_capacity(2 * CHUNK_BYTES));
        Ok(PackedStep::Chunk(chunk.into()))
    }

    fn finish(&mut self) -> io::Result<PackedStep> {
        self.tar.finish()?;
        self.tar.get_mut().try_finish()?;
        let last = std::mem::take(self.tar.get_mut().get_mut());
        Ok(PackedStep::Last(last.into()))
    }

    /// Packs some of the open file. Returns how much, in bytes.
    fn pack_content(&mut self) -> io::Result<usize> {
        let Some(packed) = &mut self.file else {
            return Ok(0);
        };
        let wanted = usize::try_from(packed.left)
            .unwrap_or(usize::MAX)
            .min(self.buffer.len());
        let mut read = packed.file.read(&mut self.buffer[..wanted])?;
        if read == 0 {
            // A file that shrinks meanwhile must still have the size in its header.
            read = wanted;
            self.buffer[..read].fill(0);
        }
        self.tar.get_mut().write_all(&self.buffer[..read])?;
        packed.left -= read as u64;
        if packed.left == 0 {
            let padding = [0; BLOCK_BYTES as usize];
            self.tar
                .get_mut()
                .write_all(&padding[..packed.padding as usize])?;
            self.file = None;
        }
        Ok(read)
    }

    /// Packs the next entry, without a file's content; `None` if there is no further one.
    fn pack_entry(&mut self) -> io::Result<Option<()>> {
        let (name, path) = loop {
            let Some(folder) = self.open.last_mut() else {
                return Ok(None);
            };
            match folder.next_name()? {
                Some(name) => {
                    let path = folder.path.join(std::ffi::OsStr::new(&*name.to_string_lossy()));
                    break (name, path);
                }
                None => drop(self.open.pop()),
            }
        };
        let Some(OpenFolder { folder, .. }) = self.open.last() else {
            return Ok(None);
        };
        let Ok(stat) = rustix::fs::statat(folder, &name, AtFlags::SYMLINK_NOFOLLOW) else {
            return Ok(Some(()));
        };
        let mut header = tar::Header::new_gnu();
        header.set_mode(stat.st_mode & 0o777);
        header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or(0));
        header.set_size(0);
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let opened = open_entry(folder, &name, OFlags::DIRECTORY);
                header.set_entry_type(tar::EntryType::Directory);
                if let Ok(opened) = opened {
                    self.tar.append_data(&mut header, &path, io::empty())?;
                    if self.open.len() <= MAX_DEPTH {
                        self.open.push(OpenFolder::new(opened, path));
                    }
                }
            }
            FileType::RegularFile => {
                if let Ok(opened) = open_entry(folder, &name, OFlags::NONBLOCK) {
                    self.begin_file(header, &path, opened.into())?;
                }
            }
            FileType::Symlink => {
                if let Ok(target) = rustix::fs::readlinkat(folder, &name, Vec::new()) {
                    header.set_entry_type(tar::EntryType::Symlink);
                    self.tar
                        .append_link(&mut header, &path, &*target.to_string_lossy())?;
                }
            }
            _ => {}
        }
        Ok(Some(()))
    }

    fn begin_file(&mut self, mut header: tar::Header, path: &Path, file: File) -> io::Result<()> {
        let stat = rustix::fs::fstat(&file)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            // Replaced since it was looked at.
            return Ok(());
        }
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        header.set_entry_type(tar::EntryType::Regular);
        header.set_size(size);
        // The header alone: the content follows step by step.
        self.tar.append_data(&mut header, path, io::empty())?;
        if size > 0 {
            let padding = size.next_multiple_of(BLOCK_BYTES) - size;
            let left = size;
            self.file = Some(PackedFile { file, left, padding });
        }
        Ok(())
    }
}
